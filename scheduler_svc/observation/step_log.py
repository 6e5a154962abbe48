"""The steps of one executor as they were: phases, sizes, blocks that moved.

    planned ── begin ──> in flight, oldest first ── end ──> the latest 256 samples

`wire_ns` is what is left of the time from plan to result once all that anybody accounts for
is taken off, so the phases of a sample add up to the whole.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from octavo.v1 import executor_pb2 as pb

from scheduler_svc.core.step import StepPlan, StepRecord, StepTimings
from scheduler_svc.observation.spans import Spans, StepSpan
from scheduler_svc.observation.step_sample import StepSample

MAX_SAMPLES = 256


@dataclass(slots=True)
class _InFlight:
    began_ns: int
    message: pb.StepPlan
    sample: StepSample
    span: StepSpan | None


class StepLog:
    """Notes the steps of one executor.

    Attributes:
        num_ended: samples that there ever were.
    """

    def __init__(self, executor: str, spans: Spans) -> None:
        """Log for the executor of this address."""
        self.num_ended = 0
        self._executor = executor
        self._spans = spans
        self._in_flight: deque[_InFlight] = deque()
        self._samples: deque[StepSample] = deque(maxlen=MAX_SAMPLES)

    def begin(
        self, began_ns: int, plan: StepPlan, record: StepRecord, message: pb.StepPlan
    ) -> None:
        """A plan is about to leave; its message gets the trace context, if it is traced.

        Args:
            began_ns: when planning began, by the monotonic clock.
            plan: what was decided.
            record: what the core remembers of it.
            message: what will be sent.
        """
        plan_ns = time.monotonic_ns() - began_ns
        planned_unix_ns = time.time_ns() - plan_ns
        span = self._spans.begin_step(self._executor, record, planned_unix_ns, plan_ns)
        if span is not None:
            span.send_with(plan, message)
        sample = StepSample(
            plan.step_id,
            planned_unix_ns,
            plan_ns,
            plan.num_decodes,
            record.num_tokens - plan.num_decodes,
            len(record.sampled),
            plan.copy_destinations,
            plan.swap_out_device_blocks,
            plan.swap_in_device_blocks,
        )
        self._in_flight.append(_InFlight(began_ns, message, sample, span))

    def end(self, timings: StepTimings) -> StepSample:
        """The oldest step in flight has been executed."""
        step = self._in_flight.popleft()
        sample = step.sample
        sample.plan_bytes = step.message.ByteSize()
        sample.queue_ns = timings.queue_ns
        sample.idle_ns = timings.idle_ns
        sample.prepare_ns = timings.prepare_ns
        sample.forward_ns = timings.forward_ns
        sample.sample_ns = timings.sample_ns
        accounted = sample.plan_ns + timings.queue_ns + timings.prepare_ns
        accounted += timings.forward_ns + timings.sample_ns
        sample.wire_ns = max(0, time.monotonic_ns() - step.began_ns - accounted)
        if step.span is not None:
            step.span.end(sample)
        self._samples.append(sample)
        self.num_ended += 1
        return sample

    def lose(self, reason: str) -> None:
        """What is in flight will not come back."""
        for step in self._in_flight:
            if step.span is not None:
                step.span.fail(reason)
        self._in_flight.clear()

    def since(self, num_seen: int) -> Iterable[StepSample]:
        """Give the samples after the first so many, oldest first, as far as they are kept."""
        num_new = min(self.num_ended - num_seen, len(self._samples))
        return islice(self._samples, len(self._samples) - num_new, None)
