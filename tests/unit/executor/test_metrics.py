"""The executor's metrics: steps as they were answered, and what is so now."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from octavo.metrics import Metric, Reading

from executor_svc import metrics as m
from executor_svc.device_thread import DeviceThread
from executor_svc.metrics import Metrics
from executor_svc.ownership import Ownership
from executor_svc.plan import Outcome, StepError, StepErrorKind, Timings
from tests.unit.executor.test_ownership import DESCRIPTION


class _Device(DeviceThread):
    """A device that has loaded, or not, and is at something."""

    def __init__(self, *, is_ready: bool = True) -> None:
        super().__init__(lambda: None)  # type: ignore[arg-type,return-value]  # never started
        self.num_rows = 5
        self.ready = Future()
        if is_ready:
            self.ready.set_result(DESCRIPTION)

    def busy_seconds(self) -> float:
        return 0.75


def _metrics(device: _Device | None = None, *, is_draining: bool = False) -> Metrics:
    return Metrics(device or _Device(), Ownership(), lambda: is_draining, ["STALE_EPOCH"])


def _number(reading: Reading, metric: Metric, *labels: str) -> float:
    return reading.numbers(metric)[labels]


async def test_steps_add_up() -> None:
    """Tokens, phases, busy and idle time are the sums of what was answered."""
    metrics = _metrics()
    timings = Timings(
        queue_ns=1_000_000,
        idle_ns=2_000_000,
        prepare_ns=3_000_000,
        forward_ns=20_000_000,
        move_ns=4_000_000,
        sample_ns=5_000_000,
    )
    metrics.note_outcome(Outcome(tokens=[1, 2, 3], timings=timings))
    metrics.note_outcome(Outcome(tokens=[4], row_errors=[(0, "NaN")], timings=timings))
    reading = await metrics.read()
    assert _number(reading, m.STEPS) == 2
    assert _number(reading, m.SAMPLED_TOKENS) == 4
    assert _number(reading, m.FAILED_ROWS) == 1
    assert _number(reading, m.BUSY) == pytest.approx(0.056)
    assert _number(reading, m.IDLE) == pytest.approx(0.004)
    assert _number(reading, m.BLOCK_MOVES) == pytest.approx(0.008)
    sums = {phase: h.sum for (phase,), h in reading.histograms(m.STEP_PHASE_SECONDS).items()}
    assert sums == pytest.approx(
        {"queue": 0.002, "prepare": 0.006, "forward": 0.04, "sample": 0.01}
    )
    counts = {h.count for h in reading.histograms(m.STEP_PHASE_SECONDS).values()}
    assert counts == {2}


async def test_failed_steps_are_counted_by_kind() -> None:
    """They took no time that would mean anything."""
    metrics = _metrics()
    metrics.note_outcome(Outcome(error=StepError(StepErrorKind.KV_CHECK, "no")))
    reading = await metrics.read()
    assert reading.numbers(m.FAILED_STEPS) == {
        ("out_of_memory",): 0,
        ("invalid_plan",): 0,
        ("kv_check",): 1,
        ("internal",): 0,
    }
    assert _number(reading, m.STEPS) == 1
    assert {h.count for h in reading.histograms(m.STEP_PHASE_SECONDS).values()} == {0}


async def test_claims_are_counted_by_what_became_of_them() -> None:
    """Reasons are there before they happen."""
    metrics = _metrics()
    metrics.note_claim()
    metrics.note_claim()
    metrics.note_refused_claim("STALE_EPOCH")
    metrics.note_ended_stream("LOST")
    reading = await metrics.read()
    assert _number(reading, m.CLAIMS) == 2
    assert reading.numbers(m.REFUSED_CLAIMS) == {("STALE_EPOCH",): 1}
    assert reading.numbers(m.ENDED_STREAMS) == {("LEFT",): 0, ("LOST",): 1, ("STALE_EPOCH",): 0}


async def test_the_state_is_that_of_the_moment() -> None:
    """Rows, ownership, the pool's size, the job in progress."""
    metrics = _metrics(is_draining=True)
    reading = await metrics.read()
    assert list(reading) == list(m.METRICS), "all that is documented is there"
    assert _number(reading, m.ROWS) == 5
    assert _number(reading, m.JOB_SECONDS) == 0.75
    assert _number(reading, m.DRAINING) == _number(reading, m.READY) == 1
    assert _number(reading, m.OWNED) == _number(reading, m.EPOCH) == 0
    blocks, host = DESCRIPTION.num_device_blocks, DESCRIPTION.num_host_blocks
    assert reading.numbers(m.POOL_BLOCKS) == {("device",): blocks, ("host",): host}
    sizes = {labels[0]: size for labels, size in reading.numbers(m.POOL_BYTES).items()}
    assert sizes == {
        "device": blocks * DESCRIPTION.block_bytes,
        "host": host * DESCRIPTION.block_bytes,
    }


async def test_before_the_model_is_there_it_has_no_pool() -> None:
    """Metrics are served while it loads, and say so."""
    reading = await _metrics(_Device(is_ready=False)).read()
    assert _number(reading, m.READY) == 0
    assert reading.numbers(m.POOL_BLOCKS) == reading.numbers(m.BUILD_INFO) == {}
