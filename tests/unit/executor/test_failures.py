"""Steps that fail: what the answer says, what is lost, and that the executor lives on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from executor_svc.executor import Executor
from executor_svc.plan import Plan, RowStart, Sampling, StepErrorKind

Load = Callable[..., Executor]
GOOD = Plan(starts=[RowStart(0, [1, 2, 3], 3, [0], lineage=8)], chunk_rows=[0], chunk_counts=[3])


def test_a_row_that_cannot_draw_fails_alone(tiny_llama: Path, load: Load, steps: Any) -> None:
    """If a row may draw nothing it is named with a reason, and its neighbour goes on."""
    executor = load(tiny_llama, block_size=8)
    impossible = RowStart(
        2,
        [1, 2],
        2,
        [0],
        sampling=Sampling(allowed_token_ids=[7]),
        min_tokens=1,
        stop_token_ids=[7],
    )
    outcome = steps(executor)(
        starts=[impossible, RowStart(5, [3, 4], 2, [1], sampling=Sampling(allowed_token_ids=[8]))],
        chunk_rows=[2, 5],
        chunk_counts=[2, 2],
    )
    assert outcome.tokens == [0, 8]
    ((row, message),) = outcome.row_errors
    assert row == 2
    assert "no token may be drawn" in message


def test_a_broken_plan_fails_until_reset_and_moves_nothing(tiny_llama: Path, load: Load) -> None:
    """After an invalid plan rows are gone, later plans get the same error, and a claim heals."""
    executor = load(tiny_llama, block_size=8)
    pool = executor._runner.pool
    pool.device_blocks[:] = 1
    good = Plan(starts=[RowStart(0, [1, 2], 2, [0])], chunk_rows=[0], chunk_counts=[2])
    broken = Plan(
        step_id=8, copy_sources=[0], copy_destinations=[1], chunk_rows=[6], chunk_counts=[1]
    )
    assert executor.run(good).error is None
    pool.device_blocks[:, :, 1] = 5
    failed = executor.run(broken)
    assert failed.step_id == 8
    assert failed.error is not None
    assert failed.error.kind is StepErrorKind.INVALID_PLAN
    assert (pool.device_blocks[:, :, 1] == 5).all()
    assert executor.num_rows == 0
    assert executor.run(Plan(step_id=9)).error == failed.error
    executor.reset()
    assert executor.run(good).error is None


WRONG_HIT = Plan(
    step_id=5,
    starts=[RowStart(1, [1, 2, 3], 3, [0], num_computed_tokens=2, lineage=9)],
    chunk_rows=[1],
    chunk_counts=[1],
)


def test_the_sanitizer_ends_the_step_and_not_the_executor(tiny_llama: Path, load: Load) -> None:
    """A wrong read costs the rows; nothing is moved or written, and a claim heals."""
    executor = load(tiny_llama, block_size=8, kv_check=True)
    first = executor.run(GOOD)
    assert first.error is None
    pool = executor._runner.pool.device_blocks.clone()
    failed = executor.run(replace(WRONG_HIT, copy_sources=[0], copy_destinations=[7]))
    assert failed.error is not None
    assert failed.error.kind is StepErrorKind.KV_CHECK
    assert "row 1 (lineage 0x9) reads position 0" in failed.error.message
    assert "row 0 (lineage 0x8)" in failed.error.message
    # As bits: what was never written may be NaN.
    now = executor._runner.pool.device_blocks
    assert torch.equal(now.view(torch.int32), pool.view(torch.int32))
    assert executor.num_rows == 0
    assert executor.run(Plan(step_id=6)).error == failed.error
    executor.reset()
    healed = executor.run(GOOD)
    assert (healed.error, healed.tokens) == (None, first.tokens)


def test_without_the_flag_nothing_is_checked(tiny_llama: Path, load: Load) -> None:
    """The sanitizer is off unless asked for."""
    executor = load(tiny_llama, block_size=8)
    assert executor.run(GOOD).error is None
    assert executor.run(WRONG_HIT).error is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), StepErrorKind.OUT_OF_MEMORY),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            StepErrorKind.OUT_OF_MEMORY,
        ),
        (RuntimeError("shapes\nand more"), StepErrorKind.INTERNAL),
    ],
)
def test_a_failing_step_is_an_answer(
    tiny_llama: Path,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: StepErrorKind,
) -> None:
    """Memory that runs out, or any exception, ends the step and not the executor."""
    executor = load(tiny_llama, block_size=8)
    good = Plan(starts=[RowStart(0, [1, 2], 2, [0])], chunk_rows=[0], chunk_counts=[2])

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(executor._runner, "forward", fail)
        outcome = executor.run(good)
    assert outcome.error is not None
    assert outcome.error.kind is kind
    assert "\n" not in outcome.error.message
    executor.reset()
    assert executor.run(good).error is None
