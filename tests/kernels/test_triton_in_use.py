"""The Triton kernels as serving uses them: whole steps, real models' heads, huge pools.

On a GPU at sizes that fill it, under CUDA graphs; in the interpreter the same code at sizes
that it can bear, so that what a GPU will run has run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_kernels import reference
from octavo_kernels.aot.configs import LAYERS, Layer
from octavo_kernels.gpu_check.timers import CudaTimer, capture
from octavo_kernels.triton_ops.copy_blocks import copy_blocks
from octavo_kernels.triton_ops.paged_attention import paged_attention
from octavo_kernels.triton_ops.prefill_attention import prefill_attention
from octavo_kernels.triton_ops.reshape_and_cache import reshape_and_cache
from octavo_kernels.triton_ops.splits import Scratch
from octavo_kernels.triton_ops.swap_blocks import swap_blocks
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from executor_svc.config import ExecutorConfig
from executor_svc.executor import Executor
from executor_svc.plan import Plan, RowStart, TableUpdate
from executor_svc.pool import KvPool, KvShape
from tests.kernels.support import TOLERANCES

# The interpreter's logarithm of an empty split.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

BF16 = torch.bfloat16
HUGE = 2**31


def size(device: str, *, gpu: int, interpreter: int) -> int:
    return gpu if device == "cuda" else interpreter


@dataclass
class Contexts:
    """Random contexts of any length up to `longest`, in shuffled blocks of a random pool."""

    layer: Layer
    block_size: int
    num_seqs: int
    longest: int
    device: str
    seed: int = 3

    def __post_init__(self) -> None:
        self.random = torch.Generator(self.device).manual_seed(self.seed)
        blocks = -(-self.longest // self.block_size)
        num_blocks = self.num_seqs * blocks
        heads = self.layer.num_kv_heads, self.layer.head_dim
        self.pool = self.draw(2, num_blocks, self.block_size, *heads)
        drawn = {"generator": self.random, "device": self.device}
        self.tables = torch.randperm(num_blocks, **drawn).int().view(self.num_seqs, blocks)
        self.lengths = torch.randint(1, self.longest + 1, (self.num_seqs,), **drawn).int()
        self.lengths[-1] = self.longest

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, device=self.device).to(BF16)

    def options(self) -> dict[str, Any]:
        return {
            "scale": self.layer.head_dim**-0.5,
            "sliding_window": self.layer.sliding_window,
            "softcap": self.layer.softcap,
        }


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("model", LAYERS)
def test_decodes_of_real_models(model: str, block_size: int, device: str) -> None:
    """Heads, windows and soft-caps of real models, against the specification in fp32."""
    longest = size(device, gpu=4500, interpreter=20)
    contexts = Contexts(
        LAYERS[model], block_size, size(device, gpu=32, interpreter=2), longest, device
    )
    query = contexts.draw(contexts.num_seqs, contexts.layer.num_heads, contexts.layer.head_dim)
    got = paged_attention(
        query, *contexts.pool, contexts.tables, contexts.lengths, **contexts.options()
    )
    expected = reference.paged_attention(
        query.float(),
        *contexts.pool.float(),
        contexts.tables,
        contexts.lengths,
        **contexts.options(),
    )
    torch.testing.assert_close(got.float(), expected, **TOLERANCES[BF16])


@pytest.mark.parametrize("model", LAYERS)
def test_prefills_of_real_models(model: str, device: str) -> None:
    """Chunks of any length behind prefixes, against the specification in fp32."""
    longest = size(device, gpu=4500, interpreter=9)
    contexts = Contexts(LAYERS[model], 16, 3, longest, device)
    counts = [1, int(contexts.lengths[1]), longest // 3]
    contexts.lengths[0] = longest - 2
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    query = contexts.draw(sum(counts), contexts.layer.num_heads, contexts.layer.head_dim)
    chunks = {"query_starts": starts, "context_lens": contexts.lengths, **contexts.options()}
    got = prefill_attention(query, *contexts.pool, contexts.tables, **chunks)
    expected = reference.prefill_attention(
        query.float(), *contexts.pool.float(), contexts.tables, **chunks
    )
    torch.testing.assert_close(got.float(), expected, **TOLERANCES[BF16])


@dataclass
class DecodeStep:
    """A decode step over tensors that stay where they are: what a CUDA graph captures."""

    contexts: Contexts

    def __post_init__(self) -> None:
        contexts, layer = self.contexts, self.contexts.layer
        self.query = contexts.draw(contexts.num_seqs, layer.num_heads, layer.head_dim)
        shape = (2, contexts.num_seqs, layer.num_kv_heads, layer.head_dim)
        self.new = contexts.draw(*shape)
        self.slots = torch.full((contexts.num_seqs,), -1, device=contexts.device)
        self.out = torch.full_like(self.query, torch.nan)
        self.scratch = Scratch(self.query.device)

    def __call__(self) -> None:
        contexts = self.contexts
        reshape_and_cache(*self.new, *contexts.pool, self.slots)
        paged_attention(
            self.query,
            *contexts.pool,
            contexts.tables,
            contexts.lengths,
            **contexts.options(),
            out=self.out,
            max_context_len=contexts.longest,
            num_splits=3,
            scratch=self.scratch,
        )

    def advance(self, other: Contexts) -> None:
        """Take over another step's contexts and tokens; the last row becomes padding."""
        contexts = self.contexts
        contexts.tables.copy_(other.tables)
        contexts.lengths.copy_(other.lengths)
        self.query.copy_(other.draw(*self.query.shape))
        self.new.copy_(other.draw(*self.new.shape))
        last = (contexts.lengths - 1).long()
        blocks = contexts.tables.gather(1, (last // contexts.block_size)[:, None])[:, 0].long()
        self.slots.copy_(blocks * contexts.block_size + last % contexts.block_size)
        contexts.lengths[-1], self.slots[-1] = 0, -1


def test_a_captured_step_serves_other_contexts(device: str) -> None:
    """Replayed after tables, lengths and tokens changed in place, it is as if launched anew."""
    layer = LAYERS["SmolLM2-135M"]
    num_seqs = size(device, gpu=64, interpreter=3)
    longest = size(device, gpu=3000, interpreter=40)
    contexts = Contexts(layer, 16, num_seqs, longest, device)
    step = DecodeStep(contexts)
    step()
    replay: Callable[[], object] = capture(step) if device == "cuda" else step
    for seed in (5, 6):
        other = Contexts(layer, 16, num_seqs, longest, device, seed)
        step.advance(other)
        expected_pool = contexts.pool.clone()
        written = step.slots[:-1]
        for cache, new in zip(expected_pool, step.new, strict=True):
            cache.flatten(0, 1)[written] = new[:-1]
        step.out.fill_(torch.nan)
        replay()
        assert torch.equal(contexts.pool, expected_pool)
        expected = reference.paged_attention(
            step.query[:-1].float(),
            *expected_pool.float(),
            contexts.tables[:-1],
            contexts.lengths[:-1],
            **contexts.options(),
        )
        torch.testing.assert_close(step.out[:-1].float(), expected, **TOLERANCES[BF16])
        assert not step.out[-1].any()


def test_a_step_run_twice_is_the_same_to_the_bit(device: str) -> None:
    """Neither the order of programs nor what scratch held before shows in a result."""
    layer = LAYERS["SmolLM2-135M"]
    longest = size(device, gpu=9000, interpreter=40)
    contexts = Contexts(layer, 16, size(device, gpu=16, interpreter=1), longest, device)
    step = DecodeStep(contexts)
    step()
    first = step.out.clone()
    step.scratch.take(contexts.num_seqs, layer.num_heads, 3, layer.head_dim)[0].fill_(torch.nan)
    step()
    assert torch.equal(step.out, first)
    chunk = contexts.draw(longest // 2, layer.num_heads, layer.head_dim)
    once, twice = (
        prefill_attention(
            chunk,
            *contexts.pool,
            contexts.tables[-1:],
            query_starts=torch.tensor([0, len(chunk)], dtype=torch.int32, device=device),
            context_lens=contexts.lengths[-1:],
            **contexts.options(),
        )
        for _ in range(2)
    )
    assert torch.equal(once, twice)


def test_the_end_of_a_pool_of_more_than_two_to_the_31_elements(device: str) -> None:
    """Written, copied, decoded and prefilled in the last block, and nowhere else."""
    elements = size(device, gpu=HUGE, interpreter=2**16)
    num_blocks = elements // (16 * 8 * 128) + 2
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 5 * HUGE:
        pytest.skip("needs 10 GiB of GPU memory")
    pool = torch.zeros(1, 2, num_blocks, 16, 8, 128, dtype=BF16, device=device)
    last = num_blocks - 1
    slots = torch.arange(last * 16, last * 16 + 16, device=device)
    key, value = torch.randn(2, 16, 8, 128).to(BF16).to(device)
    reshape_and_cache(key, value, *pool[0], slots)
    assert torch.equal(pool[0, 0, last], key)
    assert torch.equal(pool[0, 1, last], value)
    assert not pool[0, :, :last].any()
    copy_blocks(pool, torch.tensor([last], device=device), torch.tensor([last - 1], device=device))
    assert torch.equal(pool[0, :, last - 1], pool[0, :, last])
    query = torch.randn(16, 32, 128).to(BF16).to(device)
    table = torch.tensor([[last]], dtype=torch.int32, device=device)
    length = torch.tensor([16], dtype=torch.int32, device=device)
    small = (key[None].float(), value[None].float(), torch.zeros_like(table))
    got = paged_attention(query[-1:], *pool[0], table, length, scale=0.1)
    expected = reference.paged_attention(query[-1:].float(), *small, length, scale=0.1)
    torch.testing.assert_close(got.float(), expected, **TOLERANCES[BF16])
    chunk = {
        "query_starts": torch.tensor([0, 16], dtype=torch.int32, device=device),
        "context_lens": length,
        "scale": 0.1,
    }
    got = prefill_attention(query, *pool[0], table, **chunk)
    expected = reference.prefill_attention(query.float(), *small, **chunk)
    torch.testing.assert_close(got.float(), expected, **TOLERANCES[BF16])


def test_blocks_go_to_the_host_and_come_back(device: str) -> None:
    """Out, overwritten, in at other places: what came back is what left, to the bit."""
    pool = KvPool(
        KvShape(num_layers=3, num_kv_heads=2, head_dim=64, dtype=BF16),
        block_size=16,
        num_device_blocks=size(device, gpu=2000, interpreter=12),
        num_host_blocks=size(device, gpu=1000, interpreter=6),
        device=torch.device(device),
    )
    assert pool.host_blocks.is_pinned() == (device == "cuda")
    pool.device_blocks.normal_()
    before = pool.device_blocks.clone()
    count = pool.host_blocks.shape[2]
    leaving, places = torch.randperm(2 * count)[:count].tolist(), torch.randperm(count).tolist()
    pool.swap_out(leaving, places)
    pool.device_blocks.fill_(torch.nan)
    returning = torch.randperm(2 * count)[:count].tolist()
    pool.swap_in(places, returning)
    assert torch.equal(pool.device_blocks[:, :, returning], before[:, :, leaving])
    others = sorted({*range(2 * count)} - {*returning})
    assert pool.device_blocks[:, :, others].isnan().all()


@pytest.mark.gpu
def test_the_host_pool_must_be_pinned() -> None:
    """The device is not sent to memory that it cannot address."""
    pool = torch.zeros(1, 2, 4, 16, 2, 64, device="cuda")
    block = torch.tensor([0])
    with pytest.raises(ValueError, match=r"^destination_pool is on the host and not pinned"):
        swap_blocks(pool, torch.zeros(1, 2, 4, 16, 2, 64), block.cuda(), block)


@pytest.mark.gpu
def test_a_thousand_copies_are_one_launch() -> None:
    """As many launches as one copy needs, seen by the profiler."""
    pool = torch.zeros(4, 2, 2000, 16, 2, 64, dtype=BF16, device="cuda")
    sources, destinations = torch.randperm(2000, device="cuda").view(2, -1)
    assert CudaTimer().launches(lambda: copy_blocks(pool, sources, destinations)) == 1
    assert CudaTimer().launches(lambda: copy_blocks(pool, sources[:1], destinations[:1])) == 1


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder


def greedy(folder: Path, device: str, attention: str) -> list[list[int]]:
    """Tokens of two rows that are prefilled in chunks, decode, and are swapped out and in."""
    config = ExecutorConfig(
        model="tiny",
        device=device,
        attention=attention,
        dtype="float32",
        num_blocks=16,
        num_host_blocks=4,
        num_threads=1,
    )
    executor = Executor.load(config, folder)
    assert executor.description.attention == attention
    moved = {
        "swap_out_device_blocks": [3, 0, 9],
        "swap_out_host_blocks": [2, 0, 1],
        "copy_sources": [5],
        "copy_destinations": [3],
        "swap_in_host_blocks": [2, 0, 1],
        "swap_in_device_blocks": [11, 9, 7],
        "table_updates": [TableUpdate(0, 0, [11, 9, 7, 2]), TableUpdate(1, 0, [3, 8])],
    }
    plans = [
        Plan(
            starts=[
                RowStart(0, list(range(20, 60)), 40, [3, 0, 9, 2]),
                RowStart(1, [5, 17, 3, 80], 4, [5, 8]),
            ],
            chunk_rows=[0, 1],
            chunk_counts=[33, 4],
        ),
        Plan(decode_enter_rows=[1], chunk_rows=[0], chunk_counts=[7]),
        Plan(decode_enter_rows=[0]),
        *[Plan()] * 3,
        Plan(**moved),
        *[Plan()] * 3,
    ]
    outcomes = [executor.run(plan) for plan in plans]
    assert [outcome.error for outcome in outcomes] == [None] * len(plans)
    return [list(outcome.tokens) for outcome in outcomes]


def test_an_executor_says_what_one_with_reference_attention_says(
    tiny_llama: Path, device: str
) -> None:
    """Greedy, with chunks beside decodes, and blocks copied and swapped in between."""
    fast = "triton" if device == "cuda" else "compiled"
    got = greedy(tiny_llama, device, fast)
    assert got == greedy(tiny_llama, device, "reference")
    assert [len(tokens) for tokens in got] == [1] + [2] * 9
