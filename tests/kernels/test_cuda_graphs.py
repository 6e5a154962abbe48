"""Decode steps from graphs, against the same steps launched one kernel at a time.

Without a GPU a stand-in keeps what it is given, under the guard against all that a graph
cannot hold, and runs it again on the same buffers for a replay. Under `-m gpu` the same
tests record and replay CUDA graphs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from octavo_kernels.triton_ops.splits import Scratch

from executor_svc.attention_choice import Attention
from executor_svc.batch import StepBatch, build_batch
from executor_svc.cuda_graphs import DecodeGraphs, Recorder
from executor_svc.drawn import DrawnTokens, Feed
from executor_svc.model_loader import LoadedModel
from executor_svc.model_runner import ModelRunner
from executor_svc.plan import Plan, RowStart
from executor_svc.pool import KvPool
from executor_svc.rows import RowTable
from executor_svc.sampler import Samples, sample
from executor_svc.triton_attention import TritonStep
from tests.kernels.graph_support import CONFIGS, LIMITS, load, new_pool, recorder_for

# The interpreter's logarithm of an empty split.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@pytest.fixture(autouse=True)
def _many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that small batches do not fill, so that contexts are cut into parts."""
    monkeypatch.setattr(
        "octavo_kernels.triton_ops.paged_attention._num_processors", lambda device: 16
    )


class Pair:
    """The same rows on two runners, with graphs and without, each over a pool of its own."""

    def __init__(self, loaded: LoadedModel, recorder: Recorder) -> None:
        self.rows = RowTable(LIMITS)
        self.free_blocks = np.random.default_rng(5).permutation(LIMITS.num_device_blocks).tolist()
        self.eager = self._runner(loaded, None)
        pool = new_pool(loaded.device)
        self.graphs = DecodeGraphs(loaded, pool, LIMITS, recorder)
        self.graphed = self._runner(loaded, pool)
        self.drawn: DrawnTokens | None = None

    def _runner(self, loaded: LoadedModel, graphed_pool: KvPool | None) -> ModelRunner:
        pool = graphed_pool or new_pool(loaded.device)
        make = partial(self._step, pool, Scratch(loaded.device))
        graphs = self.graphs if graphed_pool else None
        return ModelRunner(loaded, pool, Attention("triton", make), graphs)

    @staticmethod
    def _step(pool: KvPool, scratch: Scratch, batch: StepBatch) -> TritonStep:
        return TritonStep(pool, batch, pool.device_blocks.device, scratch)

    def start(self, row: int, length: int) -> RowStart:
        """Make a row of a prompt that is its own."""
        prompt = [(row * 31 + place * 7) % 97 for place in range(length)]
        blocks = [self.free_blocks.pop() for _ in range(-(-length // LIMITS.block_size))]
        return RowStart(row, prompt, length, blocks)

    def step(self, **fields: Any) -> None:
        """Run a plan on both: the same logits, the same tokens; tables grow by themselves.

        The graphed runner is fed the tokens of the step before, and not told them.
        """
        going = {*self.rows.decode_rows.tolist(), *fields.get("decode_enter_rows", ())}
        going -= {*fields.get("decode_leave_rows", ()), *fields.get("finish_rows", ())}
        full = [
            row
            for row in sorted(going)
            if self.rows.num_computed[row] == self.rows.num_blocks[row] * LIMITS.block_size
        ]
        plan = Plan(
            append_rows=full, append_blocks=[self.free_blocks.pop() for _ in full], **fields
        )
        self.rows.apply(plan)
        batch = build_batch(self.rows, plan)
        expected = self.eager.forward(batch)
        feed = None if self.drawn is None else self.drawn.feed(batch, self.rows)
        got = self.graphed.forward(_forget(batch, feed), feed)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        tokens = expected.argmax(dim=-1)
        assert torch.equal(got.argmax(dim=-1), tokens)
        places = torch.from_numpy(batch.sample_logits).to(tokens.device)
        best = torch.zeros(len(places), device=tokens.device)
        self.drawn = DrawnTokens(Samples(tokens[places], best, ()), batch, self.rows)
        self.drawn.settle(self.rows)


def _forget(batch: StepBatch, feed: Feed | None) -> StepBatch:
    """The batch without the tokens that are fed."""
    if feed is None:
        return batch
    known = batch.token_ids.copy()
    places = slice(len(feed.tokens)) if feed.places is None else feed.places.cpu().numpy()
    known[places] = 0
    return replace(batch, token_ids=known)


def serve(pair: Pair) -> None:
    """Rows join, grow over the borders of blocks and splits, leave and are replaced."""
    starts = [pair.start(row, length) for row, length in enumerate([62, 16, 1])]
    pair.step(starts=starts, chunk_rows=[0, 1, 2], chunk_counts=[62, 16, 1])
    pair.step(decode_enter_rows=[0, 1, 2])  # 3 rows in a graph of 4
    pair.step()
    pair.step()
    pair.step(finish_rows=[1], starts=[pair.start(3, 9)], chunk_rows=[3], chunk_counts=[5])
    starts = [pair.start(row, 3 + row) for row in (1, 4)]
    pair.step(decode_leave_rows=[0, 2], starts=starts, chunk_rows=[3, 1, 4], chunk_counts=[4, 4, 7])
    pair.step(decode_enter_rows=[0, 1, 2, 3, 4])  # 5 rows in a graph of 8
    pair.step(decode_leave_rows=[0, 1], finish_rows=[4])  # 2 rows where 5 were
    pair.step(finish_rows=[3])
    pair.step(decode_enter_rows=[1, 0])


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_replayed_steps_equal_those_launched_one_by_one(name: str, device: str) -> None:
    """Logits, greedy tokens and every slot of the pool, that of no row included."""
    recorder = recorder_for(device)
    pair = Pair(load(CONFIGS[name], device), recorder)
    assert pair.graphs.batch_sizes == (1, 2, 4, 8)
    assert recorder.calls == ["rehearse"] * 4 + ["record"] * 4
    recorder.calls.clear()
    serve(pair)
    # 10 steps, of which 3 have chunks; nothing is recorded again.
    assert recorder.calls == ["replay"] * 7
    torch.testing.assert_close(
        pair.graphed.pool.device_blocks, pair.eager.pool.device_blocks,
        atol=1e-4, rtol=1e-4, equal_nan=True,
    )  # fmt: skip


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_gpu() -> None:
    """From the batch to drawn tokens and on to the next batch, as torch itself sees it."""
    pair = Pair(load(CONFIGS["llama"], "cuda"), recorder_for("cuda"))
    rows, plan = pair.rows, Plan(decode_enter_rows=[0, 1, 2])
    lengths = [5, 9, 6]
    starts = [pair.start(row, length) for row, length in enumerate(lengths)]
    pair.step(starts=starts, chunk_rows=[0, 1, 2], chunk_counts=lengths)
    # One greedy row, one that draws of all tokens, one that draws of some.
    rows.state["temperature"][1:3], rows.state["top_p"][2] = 0.9, 0.7
    rows.apply(plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for runner in (pair.eager, pair.graphed):
            batch = build_batch(rows, Plan())
            feed = None if pair.drawn is None else pair.drawn.feed(batch, rows)
            with torch.inference_mode():
                samples = sample(runner.forward(batch, feed), batch, rows)
            pair.drawn = DrawnTokens(samples, batch, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pair.drawn is not None
    tokens, best = pair.drawn.wait()
    assert len(tokens) == len(best) == len(lengths)
