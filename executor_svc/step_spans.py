"""Spans of one stream of plans: of its steps, and of the prompts that it computes.

    octavo.executor.step       child of the scheduler's span of the step
    ├─ octavo.executor.queue, .prepare, .forward, .sample
    octavo.executor.prefill    child of the request's span: from the row's start to its token

Plans say by themselves whether they are traced; where none is, this does next to nothing.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.tracing import Tracing, parent_context
from octavo.v1 import executor_pb2 as pb

from executor_svc.plan import Outcome, Timings

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

_PHASES = ("queue", "prepare", "forward", "sample")


@dataclass(slots=True)
class _Prefill:
    """A row whose tokens are being computed; `num_left` of them are not planned yet."""

    span: Span
    num_left: int


@dataclass(slots=True)
class _Step:
    """A traced plan without its result; `prefills` end with it."""

    step_id: int
    traceparent: str
    num_tokens: int
    prefills: list[Span] = field(default_factory=list)


class StepSpans:
    """Makes spans from plans and results, in their order."""

    def __init__(self, tracing: Tracing | None) -> None:
        """Trace with this, or not at all."""
        self._tracing = tracing
        self._steps: deque[_Step] = deque()
        self._prefills: dict[int, _Prefill] = {}

    def note_plan(self, plan: pb.StepPlan) -> None:
        """A plan came."""
        if self._tracing is None:
            return
        if not (plan.traceparent or self._prefills or any(s.traceparent for s in plan.starts)):
            return
        for row in plan.finish_rows:
            self._end_early(row)
        for start in plan.starts:
            if start.traceparent:
                self._start(self._tracing, start)
        step = _Step(plan.step_id, plan.traceparent, sum(plan.chunk_counts))
        for row, count in zip(plan.chunk_rows, plan.chunk_counts, strict=False):
            prefill = self._prefills.get(row)
            if prefill is not None:
                prefill.num_left -= count
                if prefill.num_left <= 0:
                    step.prefills.append(self._prefills.pop(row).span)
        self._steps.append(step)

    def note_result(self, outcome: Outcome) -> None:
        """A result is about to be told."""
        if self._tracing is None or not self._steps or self._steps[0].step_id != outcome.step_id:
            return
        step = self._steps.popleft()
        timings = outcome.timings
        elapsed = time.perf_counter_ns() - timings.begin_ns if timings.begin_ns else 0
        begin = time.time_ns() - elapsed
        end = begin + timings.prepare_ns + timings.forward_ns + timings.sample_ns
        if step.traceparent:
            self._tell(self._tracing, step, outcome, begin, end)
        for span in step.prefills:
            span.end(end)

    def close(self) -> None:
        """The stream has ended, and with it whatever was not done."""
        for row in list(self._prefills):
            self._end_early(row)
        for step in self._steps:
            for span in step.prefills:
                span.end()
        self._steps.clear()

    def _start(self, tracing: Tracing, start: pb.RowStart) -> None:
        num_left = len(start.tokens) - start.num_computed_tokens
        span = tracing.tracer.start_span(
            "octavo.executor.prefill",
            parent_context(start.traceparent),
            attributes={
                "octavo.row": start.row,
                "octavo.sample_index": start.sample_index,
                "octavo.num_tokens": num_left,
                "octavo.cached_tokens": start.num_computed_tokens,
            },
        )
        if span.is_recording():
            self._prefills[start.row] = _Prefill(span, num_left)

    def _end_early(self, row: int) -> None:
        prefill = self._prefills.pop(row, None)
        if prefill is not None:
            prefill.span.set_attribute("octavo.unfinished", True)
            prefill.span.end()

    def _tell(self, tracing: Tracing, step: _Step, outcome: Outcome, begin: int, end: int) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        timings = outcome.timings
        span = tracing.tracer.start_span(
            "octavo.executor.step",
            parent_context(step.traceparent),
            attributes={
                "octavo.step.id": outcome.step_id,
                "octavo.step.num_chunk_tokens": step.num_tokens,
                "octavo.step.num_sampled": len(outcome.tokens),
                "octavo.step.idle_ns": timings.idle_ns,
                "octavo.step.move_ns": timings.move_ns,
            },
            start_time=begin - timings.queue_ns,
        )
        if outcome.error is not None:
            span.set_attribute("error.type", outcome.error.kind.value)
            span.set_status(Status(StatusCode.ERROR, outcome.error.message))
        _tell_phases(tracing, set_span_in_context(span, Context()), timings, begin)
        span.end(end)


def _tell_phases(tracing: Tracing, context: Context, timings: Timings, begin: int) -> None:
    at = begin - timings.queue_ns
    for phase in _PHASES:
        took: int = getattr(timings, f"{phase}_ns")
        if took:
            span = tracing.tracer.start_span(f"octavo.executor.{phase}", context, start_time=at)
            span.end(at + took)
        at += took
