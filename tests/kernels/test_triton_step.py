"""The executor's steps over the Triton kernels, against those over the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from octavo_kernels.triton_ops.splits import Scratch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from executor_svc.attention import ReferenceStep
from executor_svc.batch import StepBatch, build_batch
from executor_svc.model_loader import LoadedModel, forward, load_model, probe
from executor_svc.plan import Plan, RowStart
from executor_svc.pool import KvPool
from executor_svc.rows import Limits, RowTable
from executor_svc.triton_attention import TritonStep

VOCAB_SIZE = 97
PROMPTS = [[5, 17, 3, 80, 41], list(range(20, 57)), [9], list(range(90, 60, -1))]
BLOCKS = [[3], [9, 0, 4, 11, 5, 7], [2], [8, 1, 10, 6]]

LIMITS = Limits(
    max_num_rows=8,
    max_model_len=64,
    block_size=8,
    num_device_blocks=12,
    num_host_blocks=0,
    vocab_size=VOCAB_SIZE,
    max_num_batched_tokens=64,
)

# A whole prompt and part of another; then decodes beside the rest of it and a new prompt
# of one token; then decodes alone; then a chunk alone.
PLANS = [
    Plan(
        starts=[RowStart(row, PROMPTS[row], len(PROMPTS[row]), BLOCKS[row]) for row in range(4)],
        chunk_rows=[0, 1],
        chunk_counts=[5, 20],
    ),
    Plan(decode_enter_rows=[0], chunk_rows=[1, 2], chunk_counts=[17, 1]),
    Plan(decode_enter_rows=[1, 2]),
    Plan(decode_leave_rows=[0, 1, 2], chunk_rows=[3], chunk_counts=[30]),
]


SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    # Soft-capped scores, and a sliding window in every other layer.
    "gemma2": Gemma2Config(**SHAPE, sliding_window=6, attn_logit_softcapping=20.0),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, with logits that differ clearly."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.3)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


class Replica:
    """A model with a pool of its own, NaN wherever nothing was written."""

    def __init__(self, folder: Path, device: str) -> None:
        self.loaded: LoadedModel = load_model(
            folder, device=device, dtype="float32", max_model_len=64
        )
        self.pool = KvPool(
            probe(self.loaded, 2),
            block_size=LIMITS.block_size,
            num_device_blocks=LIMITS.num_device_blocks,
            num_host_blocks=0,
            device=self.loaded.device,
        )
        self.pool.device_blocks.fill_(torch.nan)

    def run(self, batch: StepBatch, step: ReferenceStep | TritonStep) -> torch.Tensor:
        places = (batch.token_ids, batch.positions, batch.kept_tokens)
        tokens, positions, kept = (torch.from_numpy(each).to(self.loaded.device) for each in places)
        return forward(self.loaded, tokens, positions, step, kept)


def test_steps_equal_the_reference(folder: Path, device: str) -> None:
    """Chunks, decodes and both together give the reference's logits and the same pool."""
    reference, triton = Replica(folder, device), Replica(folder, device)
    where = triton.loaded.device
    rows, scratch = RowTable(LIMITS), Scratch(where)
    for plan in PLANS:
        rows.apply(plan)
        batch = build_batch(rows, plan)
        expected = reference.run(batch, ReferenceStep(reference.pool, batch, where))
        got = triton.run(batch, TritonStep(triton.pool, batch, where, scratch))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        rows.append_tokens(batch.sample_rows, np.full(len(batch.sample_rows), 11))
    torch.testing.assert_close(
        triton.pool.device_blocks, reference.pool.device_blocks, atol=1e-4, rtol=1e-4,
        equal_nan=True,
    )  # fmt: skip


def test_a_table_of_any_width_is_read(folder: Path, device: str) -> None:
    """A batch whose tables are wider than its contexts, entries past them naming no block."""
    replica = Replica(folder, device)
    rows = RowTable(LIMITS)
    rows.apply(PLANS[0])
    batch = build_batch(rows, PLANS[0])
    where = replica.loaded.device
    expected = replica.run(batch, ReferenceStep(replica.pool, batch, where))
    tables = np.full((2, 19), 10**6, np.int32)
    for index, length in enumerate(batch.context_lens):
        used = -(-int(length) // LIMITS.block_size)
        tables[index, :used] = batch.block_tables[index, :used]
    wide = replace(batch, block_tables=tables)
    got = replica.run(wide, TritonStep(replica.pool, wide, where, Scratch(where)))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
