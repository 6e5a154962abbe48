"""Hand-made plans over a tiny random model equal plain transformers, token for token."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    MistralConfig,
    PreTrainedConfig,
)

from executor_svc.executor import Executor
from executor_svc.plan import Outcome, Plan, RowStart, Sampling

PROMPTS = [[5, 17, 3, 80, 41], list(range(20, 57)), [9], list(range(90, 60, -1))]
COUNT = 12

Load = Callable[..., Executor]
Generate = Callable[[Path, list[int], int], list[int]]


def tables(executor: Executor, lengths: list[int]) -> list[list[int]]:
    """Block tables for sequences of these lengths, interleaved over the pool."""
    size = executor.description.block_size
    needed = [-(-length // size) for length in lengths]
    result: list[list[int]] = [[] for _ in lengths]
    block = executor.description.num_device_blocks
    for logical in range(max(needed)):
        for index, count in enumerate(needed):
            if logical < count:
                block -= 1
                result[index].append(block)
    return result


def decode(steps: Any, rows: list[int], count: int, outputs: dict[int, list[int]]) -> None:
    """Let rows decode `count` steps; they enter the decode set now and leave it after."""
    for step in range(count):
        outcome = steps(
            decode_enter_rows=rows if step == 0 else [],
        )
        for row, token in zip(sorted(rows), outcome.tokens, strict=True):
            outputs[row].append(token)
    steps(decode_leave_rows=rows)


@pytest.mark.parametrize(("block_size", "chunk"), [(8, 3), (16, 16), (32, 128)])
def test_interleaved_chunked_prompts_equal_generate(
    tiny_llama: Path, load: Load, generate: Generate, steps: Any, block_size: int, chunk: int
) -> None:
    """Prompts of any length, in chunks of any size, beside decoding rows."""
    executor = load(tiny_llama, block_size=block_size)
    run = steps(executor)
    blocks = tables(executor, [len(prompt) + COUNT for prompt in PROMPTS])
    outputs: dict[int, list[int]] = {row: [] for row in range(len(PROMPTS))}
    decoding: list[int] = []
    pending = {}
    starts = []
    for row, prompt in enumerate(PROMPTS):
        starts.append(RowStart(row, prompt, len(prompt), blocks[row]))
        pending[row] = len(prompt)
    entering: list[int] = []
    while pending or any(len(output) < COUNT for output in outputs.values()):
        leaving = [row for row in decoding if len(outputs[row]) == COUNT]
        decoding = sorted({*decoding, *entering} - set(leaving))
        chunks = dict([(row, min(chunk, left)) for row, left in pending.items()][:2])
        outcome = run(
            starts=starts,
            decode_enter_rows=entering,
            decode_leave_rows=leaving,
            chunk_rows=list(chunks),
            chunk_counts=list(chunks.values()),
        )
        starts, entering = [], []
        for row, count in chunks.items():
            pending[row] -= count
            if not pending[row]:
                del pending[row]
                entering.append(row)
        drawing = sorted([*decoding, *entering])
        for row, token in zip(drawing, outcome.tokens, strict=True):
            outputs[row].append(token)
    for row, prompt in enumerate(PROMPTS):
        assert outputs[row] == generate(tiny_llama, prompt, COUNT), f"row {row}"


CONFIGS: dict[str, PreTrainedConfig] = {
    "sliding window": MistralConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        sliding_window=9,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
    ),
    "soft-cap and layers of two kinds": Gemma2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=9,
        attn_logit_softcapping=4.0,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    ),
    "learned positions": GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        eos_token_id=None,
        bos_token_id=None,
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_other_architectures_have_the_same_logprobs(
    make_model: Callable[[PreTrainedConfig], Path], load: Load, steps: Any, kind: str
) -> None:
    """What a model asks of its attention is honoured, in chunks and in decode."""
    folder = make_model(CONFIGS[kind])
    executor = load(folder, block_size=8)
    run, prompt = steps(executor), PROMPTS[1]
    (blocks,) = tables(executor, [len(prompt) + COUNT])
    start = RowStart(0, prompt, len(prompt), blocks, num_logprobs=5)
    run(starts=[start], chunk_rows=[0], chunk_counts=[20])
    outcomes = [run(chunk_rows=[0], chunk_counts=[len(prompt) - 20])]
    outcomes += [run(decode_enter_rows=[0])]
    outcomes += [run() for _ in range(COUNT - 2)]
    tokens = [token for outcome in outcomes for token in outcome.tokens]
    exact = exact_logprobs(folder, prompt + tokens)[len(prompt) - 1 :]
    for outcome, line in zip(outcomes, exact[:COUNT], strict=True):
        sampled = outcome.logprobs[0].sampled
        assert sampled is not None
        assert list(sampled.top_logprobs) == pytest.approx(line.topk(5).values.tolist(), abs=1e-3)
        assert sampled.chosen_token == line.argmax()


def prefill(run: Any, row: int, tokens: list[int], blocks: list[int], **fields: Any) -> Outcome:
    fields.setdefault("num_prompt_tokens", len(tokens))
    return run(
        starts=[RowStart(row, tokens, blocks=blocks, **fields)],
        chunk_rows=[row],
        chunk_counts=[len(tokens)],
    )


def test_forks_share_blocks_until_one_is_copied(
    tiny_llama: Path, load: Load, generate: Generate, steps: Any
) -> None:
    """After a copy-on-write the fork and its parent go on apart, each as if alone."""
    from executor_svc.plan import TableUpdate

    executor = load(tiny_llama, block_size=8)
    run, prompt = steps(executor), PROMPTS[1][:21]  # the third block is partly filled
    outcome = run(
        starts=[RowStart(3, prompt, 21, [1, 2, 3, 4, 5])],
        chunk_rows=[3],
        chunk_counts=[21],
        fork_parents=[3],
        fork_rows=[0],
        fork_sample_indices=[1],
    )
    expected = generate(tiny_llama, prompt, COUNT)
    assert outcome.tokens == [expected[0], expected[0]]
    # Row 0 is told another token than the one drawn: it becomes a beam child of itself.
    other = (expected[0] + 1) % 97
    run(finish_rows=[0])
    run(
        starts=[RowStart(0, [*prompt, other], 21, [1, 2, 3], num_computed_tokens=21)],
        table_updates=[TableUpdate(0, 2, [9]), TableUpdate(0, 3, [10, 11])],
        copy_sources=[3],
        copy_destinations=[9],
        decode_enter_rows=[0, 3],
    )
    for _ in range(COUNT - 2):
        outcome = run()
    run(decode_leave_rows=[0, 3])
    known = executor._rows.tokens
    assert known[3, 21 : 21 + COUNT].tolist() == expected
    assert known[0, 22 : 22 + COUNT - 1].tolist() == generate(
        tiny_llama, [*prompt, other], COUNT - 1
    )


def test_swapping_out_and_in_changes_no_token(
    tiny_llama: Path, load: Load, generate: Generate, steps: Any
) -> None:
    """A row whose blocks left, were overwritten and came back elsewhere goes on."""
    from executor_svc.plan import TableUpdate

    executor = load(tiny_llama, block_size=16, num_blocks=8, num_host_blocks=4)
    run, prompt = steps(executor), PROMPTS[1]
    outputs = {0: list(prefill(run, 0, prompt, [0, 1, 2]).tokens)}
    decode(run, [0], 4, outputs)
    run(swap_out_device_blocks=[0, 1, 2], swap_out_host_blocks=[3, 0, 1])
    prefill(run, 1, PROMPTS[3] + PROMPTS[0], [2, 0, 1])
    run(
        finish_rows=[1],
        swap_in_host_blocks=[3, 0, 1],
        swap_in_device_blocks=[7, 2, 5],
        table_updates=[TableUpdate(0, 0, [7, 2, 5, 6], truncate=True)],
    )
    decode(run, [0], COUNT - 5, outputs)
    assert outputs[0] == generate(tiny_llama, prompt, COUNT)


def test_moves_happen_in_the_order_of_the_protocol(tiny_llama: Path, load: Load) -> None:
    """One step swaps out, copies and swaps in, each reading what the one before left."""
    executor = load(tiny_llama, block_size=8, num_blocks=4, num_host_blocks=2)
    pool = executor._runner.pool
    for block in range(4):
        pool.device_blocks[:, :, block] = block
    pool.host_blocks[:] = 9
    outcome = executor.run(
        Plan(
            swap_out_device_blocks=[1],
            swap_out_host_blocks=[0],
            copy_sources=[0],
            copy_destinations=[1],
            swap_in_host_blocks=[0],
            swap_in_device_blocks=[2],
        )
    )
    assert outcome.error is None
    assert [pool.device_blocks[:, :, block].unique().tolist() for block in range(4)] == [
        [0.0], [0.0], [1.0], [3.0],
    ]  # fmt: skip


def test_recompute_goes_on_where_it_stopped(
    tiny_llama: Path, load: Load, generate: Generate, steps: Any
) -> None:
    """A row started again with prompt and output so far gives the rest, in other blocks."""
    executor = load(tiny_llama, block_size=8)
    run, prompt = steps(executor), PROMPTS[0]
    outputs = {0: list(prefill(run, 0, prompt, [0, 1, 2]).tokens)}
    decode(run, [0], 4, outputs)
    run(finish_rows=[0])
    known = [*prompt, *outputs[0]]
    outputs[2] = list(prefill(run, 2, known, [9, 8, 7], num_prompt_tokens=len(prompt)).tokens)
    decode(run, [2], COUNT - 6, outputs)
    assert outputs[0] + outputs[2] == generate(tiny_llama, prompt, COUNT)


def test_cached_prefix_is_not_computed_again(
    tiny_llama: Path, load: Load, generate: Generate, steps: Any
) -> None:
    """A second row that is given the first one's full blocks computes only the rest."""
    executor = load(tiny_llama, block_size=8)
    run, prompt = steps(executor), PROMPTS[1]
    prefill(run, 0, prompt, [0, 1, 2, 3, 4])
    longer = [*prompt[:32], 1, 2, 3]
    first = run(
        starts=[RowStart(1, longer, 35, [0, 1, 2, 3, 20, 21], num_computed_tokens=32)],
        chunk_rows=[1],
        chunk_counts=[3],
    )
    outputs = {1: list(first.tokens)}
    decode(run, [1], 5, outputs)
    assert outputs[1] == generate(tiny_llama, longer, 6)


SAMPLING = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=1234)


def test_draws_do_not_depend_on_company_or_preemption(
    tiny_llama: Path, load: Load, steps: Any
) -> None:
    """A seeded row draws the same alone, beside others, and after a recompute."""
    executor = load(tiny_llama, block_size=8)
    run, prompt = steps(executor), PROMPTS[0]
    alone = {0: list(prefill(run, 0, prompt, [0, 1, 2], sampling=SAMPLING).tokens)}
    decode(run, [0], 10, alone)

    run = steps(executor)
    prefill(run, 1, PROMPTS[1], list(range(10, 20)), sampling=Sampling(temperature=9, seed=1234))
    both: dict[int, list[int]] = {1: [], 6: []}
    both[6] += prefill(run, 6, prompt, [0, 1, 2], sampling=SAMPLING).tokens
    decode(run, [6, 1], 4, both)
    run(finish_rows=[6])
    known = [*prompt, *both[6]]
    again = {
        5: list(prefill(run, 5, known, [30, 31, 32], num_prompt_tokens=5, sampling=SAMPLING).tokens)
    }
    decode(run, [5, 1][:1], 5, again)
    assert both[6] + again[5] == alone[0]


def test_samples_of_one_request_differ(tiny_llama: Path, load: Load, steps: Any) -> None:
    """Forks of one prompt draw different numbers, keyed by their sample index."""
    executor = load(tiny_llama, block_size=8)
    outcome = steps(executor)(
        starts=[RowStart(0, [1, 2], 2, [0], sampling=Sampling(temperature=50.0, seed=3))],
        chunk_rows=[0],
        chunk_counts=[2],
        fork_parents=[0] * 7,
        fork_rows=list(range(1, 8)),
        fork_sample_indices=list(range(1, 8)),
    )
    assert len(set(outcome.tokens)) > 4  # of eight draws from 97 nearly equal tokens


def exact_logprobs(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)


def test_prompt_logprobs_over_chunks(tiny_llama: Path, load: Load, steps: Any) -> None:
    """Chunks together tell every prompt position after the first, as transformers has it."""
    executor = load(tiny_llama, block_size=8)
    run, prompt = steps(executor), PROMPTS[1]
    start = RowStart(0, prompt, len(prompt), list(range(6)), num_prompt_logprobs=2, num_logprobs=1)
    told, sampled = [], []
    for index, count in enumerate([7, 1, 16, 13]):
        outcome = run(starts=[start] if index == 0 else [], chunk_rows=[0], chunk_counts=[count])
        for logprobs in outcome.logprobs:
            told += logprobs.prompt
            sampled += [logprobs.sampled] if logprobs.sampled else []
    exact = exact_logprobs(tiny_llama, prompt)
    assert [position.chosen_token for position in told] == prompt[1:]
    for place, position in enumerate(told):
        assert position.chosen_logprob == pytest.approx(
            exact[place, prompt[place + 1]].item(), abs=1e-4
        )
        assert list(position.top_tokens) == exact[place].topk(2).indices.tolist()
    (last,) = sampled
    assert last.chosen_token == outcome.tokens[0] == exact[-1].argmax()
    assert list(last.top_tokens) == [last.chosen_token]


def test_beam_rows_report_candidates_and_append_nothing(
    tiny_llama: Path, load: Load, steps: Any
) -> None:
    """A beam row waits for its children; each child decodes from its own token."""
    executor = load(tiny_llama, block_size=8)
    run, prompt = steps(executor), PROMPTS[0]
    first = prefill(run, 0, prompt, [0, 1], num_beam_candidates=4)
    exact = exact_logprobs(tiny_llama, prompt)[-1]
    (logprobs,) = first.logprobs
    best = exact.topk(4)
    assert list(logprobs.sampled.top_tokens) == best.indices.tolist()
    assert list(logprobs.sampled.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)
    assert first.tokens == [best.indices[0]]
    (digest,) = executor.audit()
    assert digest.num_tokens == digest.num_computed_tokens == len(prompt)

    from executor_svc.plan import TableUpdate

    one, two = best.indices[:2].tolist()
    second = run(
        child_parents=[0, 0],
        child_rows=[0, 4],
        child_tokens=[one, two],
        table_updates=[TableUpdate(4, 0, [7])],
        copy_sources=[0],
        copy_destinations=[7],
        decode_enter_rows=[0, 4],
    )
    for child, token in zip(second.logprobs, (one, two), strict=True):
        expected = exact_logprobs(tiny_llama, [*prompt, token])[-1].topk(4)
        assert list(child.sampled.top_tokens) == expected.indices.tolist()


def test_unwritten_slots_are_never_read(
    tiny_llama: Path, load: Load, generate: Generate, steps: Any
) -> None:
    """In a pool full of NaN the tokens are the same: nothing past a context leaks in."""
    executor = load(tiny_llama, block_size=32)
    executor._runner.pool.device_blocks[:] = math.nan
    run = steps(executor)
    outputs = {}
    for row, prompt in enumerate(PROMPTS):
        blocks = [row * 3, row * 3 + 1, row * 3 + 2]
        outputs[row] = list(prefill(run, row, prompt, blocks).tokens)
    decode(run, list(range(len(PROMPTS))), COUNT - 1, outputs)
    for row, prompt in enumerate(PROMPTS):
        assert outputs[row] == generate(tiny_llama, prompt, COUNT)


def test_pool_is_sized_from_memory(tiny_llama: Path, load: Load) -> None:
    """Without a number of blocks the pool takes its share, and swapping its own."""
    gib = 1 << 30
    executor = load(
        tiny_llama,
        num_blocks=0,
        num_host_blocks=None,
        kv_cache_gib=4096 * 10 / gib,
        host_cache_gib=4096 * 3.5 / gib,
        block_size=8,
    )
    description = executor.description
    # Two layers, keys and values, 8 tokens, 2 heads of 8 values, 4 bytes each.
    assert description.block_bytes == 2 * 2 * 8 * 2 * 8 * 4 == 2048
    assert (description.num_device_blocks, description.num_host_blocks) == (20, 7)
