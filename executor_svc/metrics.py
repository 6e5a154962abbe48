"""The executor's metrics: what they are, and how they are read.

Steps are counted where their answers leave the device thread, on the event loop; what is
the state's (rows, ownership, the pool's size) is read when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from octavo.metrics import Histogram, Kind, Metric, Reading, Tally

from executor_svc.device_thread import DeviceThread
from executor_svc.ownership import Ownership
from executor_svc.plan import Description, Outcome, StepErrorKind

_NS = 1e-9
_STEP_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 10.0, 60.0),
)
_PHASES = ("queue", "prepare", "forward", "sample")


def _metric(kind: Kind, name: str, unit: str, help: str, *labels: str) -> Metric:
    buckets = _STEP_BUCKETS if kind is Kind.HISTOGRAM else ()
    return Metric(f"octavo_executor_{name}", kind, unit, help, labels, buckets)


BUILD_INFO = _metric(
    Kind.GAUGE,
    "build_info",
    "",
    "Always 1, once the model is loaded; the labels say what runs.",
    *("version", "model", "dtype", "device", "attention"),
)
READY = _metric(Kind.GAUGE, "ready", "", "1 once the model is loaded.")
DRAINING = _metric(Kind.GAUGE, "draining", "", "1 while the executor shuts down.")
OWNED = _metric(Kind.GAUGE, "owned", "", "1 while a scheduler holds the executor.")
EPOCH = _metric(Kind.GAUGE, "epoch", "claims", "Epoch of the last claim.")
ROWS = _metric(Kind.GAUGE, "rows", "rows", "Sequences that exist.")
MAX_ROWS = _metric(Kind.GAUGE, "max_rows", "rows", "Sequences that may exist at once.")
POOL_BLOCKS = _metric(
    Kind.GAUGE, "pool_blocks", "blocks", "KV blocks that there are, by pool: device, host.", "pool"
)
POOL_BYTES = _metric(
    Kind.GAUGE, "pool_bytes", "bytes", "Memory of the KV blocks, by pool: device, host.", "pool"
)
JOB_SECONDS = _metric(
    Kind.GAUGE,
    "job_seconds",
    "seconds",
    "How long the step, or other job, that the device is at has been running; 0 if there is none.",
)
CLAIMS = _metric(Kind.COUNTER, "claims_total", "claims", "Claims that were granted.")
REFUSED_CLAIMS = _metric(
    Kind.COUNTER, "refused_claims_total", "claims", "Claims that were refused, by reason.", "reason"
)
ENDED_STREAMS = _metric(
    Kind.COUNTER,
    "ended_streams_total",
    "claims",
    "Claims that ended, by reason: LEFT (the scheduler gave the executor back), LOST (its "
    "connection broke), or why they could not go on.",
    "reason",
)
STEPS = _metric(Kind.COUNTER, "steps_total", "steps", "Steps that were answered, failed ones too.")
FAILED_STEPS = _metric(
    Kind.COUNTER,
    "failed_steps_total",
    "steps",
    "Steps that failed as a whole, by kind of error: out_of_memory, invalid_plan, kv_check, "
    "internal.",
    "kind",
)
FAILED_ROWS = _metric(
    Kind.COUNTER, "failed_rows_total", "rows", "Rows whose logits were not finite."
)
SAMPLED_TOKENS = _metric(Kind.COUNTER, "sampled_tokens_total", "tokens", "Tokens drawn.")
STEP_PHASE_SECONDS = _metric(
    Kind.HISTOGRAM,
    "step_phase_seconds",
    "seconds",
    "Time of each phase of a step: queue (the plan waited for the device), prepare, forward, "
    "sample.",
    "phase",
)
BUSY = _metric(
    Kind.COUNTER,
    "busy_seconds_total",
    "seconds",
    "Time that steps were prepared, computed and sampled.",
)
IDLE = _metric(
    Kind.COUNTER,
    "idle_seconds_total",
    "seconds",
    "Time that the device waited for the next step, counted when that comes; also while there "
    "was no request.",
)
BLOCK_MOVES = _metric(
    Kind.COUNTER,
    "block_move_seconds_total",
    "seconds",
    "Time that blocks were copied and swapped, a part of the forward phase.",
)

METRICS = tuple(value for value in dict(globals()).values() if isinstance(value, Metric))


class Metrics:
    """The metrics of one executor; every method is called on its event loop."""

    def __init__(
        self,
        device: DeviceThread,
        ownership: Ownership,
        is_draining: Callable[[], bool],
        refusals: Iterable[str],
    ) -> None:
        """Read from these.

        Args:
            device: runs the steps.
            ownership: of the executor.
            is_draining: whether it shuts down.
            refusals: reasons for which a claim may be refused or end.
        """
        self._device = device
        self._ownership = ownership
        self._is_draining = is_draining
        self._num_steps = self._num_tokens = self._num_failed_rows = self._num_claims = 0
        self._idle_ns = self._busy_ns = self._move_ns = 0
        self._failed = Tally(kind.value for kind in StepErrorKind)
        self._refused = Tally(refusals)
        self._ended = Tally(("LEFT", "LOST", *self._refused))
        self._phases = [Histogram(STEP_PHASE_SECONDS.buckets) for _ in _PHASES]

    # -- what is told ----------------------------------------------------------------------

    def note_outcome(self, outcome: Outcome) -> None:
        """A step was answered."""
        self._num_steps += 1
        if outcome.error is not None:
            self._failed.note(outcome.error.kind.value)
            return
        self._num_tokens += len(outcome.tokens)
        self._num_failed_rows += len(outcome.row_errors)
        timings = outcome.timings
        prepare_ns, forward_ns = timings.prepare_ns, timings.forward_ns
        sample_ns = timings.sample_ns
        self._idle_ns += timings.idle_ns
        self._move_ns += timings.move_ns
        self._busy_ns += prepare_ns + forward_ns + sample_ns
        queue, prepare, forward, sample = self._phases
        queue.observe(timings.queue_ns * _NS)
        prepare.observe(prepare_ns * _NS)
        forward.observe(forward_ns * _NS)
        sample.observe(sample_ns * _NS)

    def note_claim(self) -> None:
        """A scheduler owns the executor from now on."""
        self._num_claims += 1

    def note_refused_claim(self, reason: str) -> None:
        """A claim was refused."""
        self._refused.note(reason)

    def note_ended_stream(self, reason: str) -> None:
        """A claim ended."""
        self._ended.note(reason)

    # -- what is read ------------------------------------------------------------------------

    async def read(self) -> Reading:
        """Read everything."""
        reading = Reading(METRICS)
        ready = self._device.ready
        is_ready = ready.done() and ready.exception() is None
        reading.add(READY, int(is_ready))
        reading.add(DRAINING, int(self._is_draining()))
        reading.add(OWNED, int(self._ownership.lease is not None))
        reading.add(EPOCH, self._ownership.epoch)
        reading.add(ROWS, self._device.num_rows)
        reading.add(JOB_SECONDS, self._device.busy_seconds())
        if is_ready:
            _read_description(reading, ready.result())
        self._read_totals(reading)
        return reading

    def _read_totals(self, reading: Reading) -> None:
        reading.add(CLAIMS, self._num_claims)
        reading.add_tally(REFUSED_CLAIMS, self._refused)
        reading.add_tally(ENDED_STREAMS, self._ended)
        reading.add(STEPS, self._num_steps)
        reading.add_tally(FAILED_STEPS, self._failed)
        reading.add(FAILED_ROWS, self._num_failed_rows)
        reading.add(SAMPLED_TOKENS, self._num_tokens)
        for phase, histogram in zip(_PHASES, self._phases, strict=True):
            reading.put(STEP_PHASE_SECONDS, histogram, phase)
        reading.add(BUSY, self._busy_ns * _NS)
        reading.add(IDLE, self._idle_ns * _NS)
        reading.add(BLOCK_MOVES, self._move_ns * _NS)


def _read_description(reading: Reading, description: Description) -> None:
    reading.add(
        BUILD_INFO,
        1,
        description.octavo_version,
        description.model,
        description.dtype,
        description.device,
        description.attention,
    )
    reading.add(MAX_ROWS, description.max_num_rows)
    for pool, num_blocks in (
        ("device", description.num_device_blocks),
        ("host", description.num_host_blocks),
    ):
        reading.add(POOL_BLOCKS, num_blocks, pool)
        reading.add(POOL_BYTES, num_blocks * description.block_bytes, pool)
