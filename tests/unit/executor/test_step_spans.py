"""Spans of plans and their results on the executor."""

from __future__ import annotations

import time

import pytest
from octavo.tracing import Tracing
from octavo.v1 import executor_pb2 as pb
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from executor_svc.plan import Outcome, StepError, StepErrorKind, Timings
from executor_svc.step_spans import StepSpans

TRACE = "0af7651916cd43dd8448eb211c80319c"
STEP = f"00-{TRACE}-b7ad6b7169203331-01"
REQUEST = "00-11111111111111111111111111111111-2222222222222222-01"
TIMINGS = Timings(queue_ns=5, prepare_ns=10, forward_ns=100, sample_ns=20)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> StepSpans:
    return StepSpans(Tracing(SimpleSpanProcessor(exporter), "test", "one"))


def outcome(step_id: int, **changes: object) -> Outcome:
    begin = time.perf_counter_ns() - 1000
    values = {"step_id": step_id, "tokens": [1], "timings": TIMINGS, **changes}
    timings = values["timings"]
    assert isinstance(timings, Timings)
    values["timings"] = Timings(
        timings.queue_ns,
        timings.idle_ns,
        timings.prepare_ns,
        timings.forward_ns,
        timings.move_ns,
        timings.sample_ns,
        begin,
    )
    return Outcome(**values)  # type: ignore[arg-type]


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def parent_of(span: ReadableSpan) -> str:
    assert span.parent is not None
    return f"{span.parent.trace_id:032x}-{span.parent.span_id:016x}"


def test_a_step_is_a_child_of_the_schedulers_and_its_phases_fill_it(
    spans: StepSpans, exporter: InMemorySpanExporter
) -> None:
    before = time.time_ns()
    spans.note_plan(pb.StepPlan(step_id=1, traceparent=STEP))
    spans.note_result(outcome(1))
    (step,) = named(exporter, "octavo.executor.step")
    assert parent_of(step) == STEP[3:-3]
    assert step.start_time is not None and step.end_time is not None
    assert step.end_time - step.start_time == 135
    assert before - 10**9 < step.start_time < time.time_ns()
    at = step.start_time
    for phase, took in (("queue", 5), ("prepare", 10), ("forward", 100), ("sample", 20)):
        (span,) = named(exporter, f"octavo.executor.{phase}")
        assert span.parent == step.context
        assert (span.start_time, span.end_time) == (at, at + took)
        at += took


def test_a_prompt_ends_with_the_step_of_its_last_chunk(
    spans: StepSpans, exporter: InMemorySpanExporter
) -> None:
    start = pb.RowStart(row=3, tokens=[1] * 10, num_computed_tokens=4, traceparent=REQUEST)
    spans.note_plan(pb.StepPlan(step_id=1, starts=[start], chunk_rows=[3], chunk_counts=[4]))
    spans.note_plan(pb.StepPlan(step_id=2, chunk_rows=[3], chunk_counts=[2]))
    spans.note_result(outcome(1))
    assert named(exporter, "octavo.executor.prefill") == []
    spans.note_result(outcome(2))
    (prefill,) = named(exporter, "octavo.executor.prefill")
    assert parent_of(prefill) == REQUEST[3:-3]
    assert (prefill.attributes or {})["octavo.num_tokens"] == 6
    assert named(exporter, "octavo.executor.step") == [], "those plans were not traced"


def test_a_row_that_ends_early_ends_its_span(
    spans: StepSpans, exporter: InMemorySpanExporter
) -> None:
    starts = [pb.RowStart(row=row, tokens=[1] * 4, traceparent=REQUEST) for row in (3, 4)]
    spans.note_plan(pb.StepPlan(step_id=1, starts=starts, chunk_rows=[3], chunk_counts=[2]))
    spans.note_result(outcome(1))
    spans.note_plan(pb.StepPlan(step_id=2, finish_rows=[3]))
    spans.close()
    found = named(exporter, "octavo.executor.prefill")
    assert [dict(span.attributes or {})["octavo.unfinished"] for span in found] == [True, True]


def test_a_failed_step_is_an_error(spans: StepSpans, exporter: InMemorySpanExporter) -> None:
    spans.note_plan(pb.StepPlan(step_id=1, traceparent=STEP))
    error = StepError(StepErrorKind.OUT_OF_MEMORY, "no room")
    spans.note_result(Outcome(step_id=1, error=error))
    (step,) = named(exporter, "octavo.executor.step")
    assert step.status.status_code is StatusCode.ERROR
    assert (step.attributes or {})["error.type"] == "out_of_memory"


def test_plans_that_are_not_traced_make_no_spans(
    spans: StepSpans, exporter: InMemorySpanExporter
) -> None:
    for step_id in (1, 2):
        spans.note_plan(pb.StepPlan(step_id=step_id, chunk_rows=[1], chunk_counts=[1, 2]))
        spans.note_result(outcome(step_id))
    assert exporter.get_finished_spans() == ()


def test_traced_and_untraced_plans_may_alternate(
    spans: StepSpans, exporter: InMemorySpanExporter
) -> None:
    for step_id in range(1, 7):
        spans.note_plan(pb.StepPlan(step_id=step_id, traceparent=STEP if step_id % 2 else ""))
    for step_id in range(1, 7):
        spans.note_result(outcome(step_id))
    steps = named(exporter, "octavo.executor.step")
    assert [(span.attributes or {})["octavo.step.id"] for span in steps] == [1, 3, 5]


def test_without_tracing_nothing_is_kept() -> None:
    spans = StepSpans(None)
    spans.note_plan(pb.StepPlan(step_id=1, traceparent=STEP))
    spans.note_result(outcome(1))
    spans.close()
