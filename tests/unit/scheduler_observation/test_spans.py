"""Spans of steps and requests, as an exporter gets them."""

from __future__ import annotations

import pytest
from octavo.tracing import Tracing, parent_context
from octavo.v1 import executor_pb2 as pb
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from scheduler_svc.core.request import Request, SamplingParams
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step import RowStart, StepPlan, StepRecord
from scheduler_svc.errors import QueueFull
from scheduler_svc.observation.spans import Spans
from scheduler_svc.observation.step_sample import StepSample

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
METADATA = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("authorization", "Bearer x"))
NO_METADATA: tuple[tuple[str, str], ...] = ()


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Spans:
    return Spans(Tracing(SimpleSpanProcessor(exporter), "test", "one"))


def sequence(name: str) -> Sequence:
    group = SequenceGroup(Request(name, [1, 2], SamplingParams(), max_tokens=2))
    return group.sequences[0]


def record(*sampled: Sequence, chunks: tuple[Sequence, ...] = ()) -> StepRecord:
    chunk_list = [(seq, 0, 2) for seq in chunks]
    return StepRecord(5, list(sampled), [], [], chunk_list, [], len(sampled) + 2 * len(chunks))


def by_name(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def test_a_request_is_a_child_of_its_caller(spans: Spans, exporter: InMemorySpanExporter) -> None:
    with spans.serve("r", "chat m", METADATA) as request:
        assert request is not None
        assert spans.trace_id("r") == TRACE
        request.set({"octavo.tenant": None, "octavo.priority": 3})
        spans.note("r", "admitted", 17, {"num_tokens": 4, "detail": ""})
    (span,) = exporter.get_finished_spans()
    assert span.context is not None and span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert dict(span.attributes or {}) == {"octavo.request_id": "r", "octavo.priority": 3}
    (event,) = span.events
    assert (event.name, event.timestamp) == ("octavo.admitted", 17)
    assert dict(event.attributes or {}) == {"octavo.num_tokens": 4}
    assert spans.trace_id("r") == ""


def test_what_a_caller_does_not_want_recorded_is_not(
    spans: Spans, exporter: InMemorySpanExporter
) -> None:
    with spans.serve("r", "chat m", (("traceparent", f"00-{TRACE}-{PARENT}-00"),)) as request:
        assert request is None
        assert spans.begin_step("e", record(sequence("r")), 1, 1) is None
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{TRACE}-{PARENT}", "00-" + "0" * 51])
def test_a_broken_parent_is_none(spans: Spans, exporter: InMemorySpanExporter, header: str) -> None:
    with spans.serve("r", "chat m", (("traceparent", header), ("x-bin", b"\xff"))):  # type: ignore[arg-type]
        pass
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_an_error_is_told(spans: Spans, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(QueueFull), spans.serve("r", "chat m", NO_METADATA):
        raise QueueFull("7 requests are waiting", 1.0)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "QueueFull"


def test_a_step_links_with_exactly_the_requests_in_it(
    spans: Spans, exporter: InMemorySpanExporter
) -> None:
    sampled, chunk, other = sequence("a"), sequence("b"), sequence("c")
    untraced = sequence("d")
    with (
        spans.serve("a", "a", NO_METADATA),
        spans.serve("b", "b", METADATA),
        spans.serve("c", "c", NO_METADATA),
    ):
        step = spans.begin_step("host:1", record(sampled, untraced, chunks=(chunk,)), 1000, 10)
        assert step is not None
        starts = [RowStart(3, [1], 0, [], chunk), RowStart(4, [1], 0, [], untraced)]
        plan = StepPlan(5, starts=starts)
        message = pb.StepPlan(starts=[pb.RowStart(row=3), pb.RowStart(row=4)])
        step.send_with(plan, message)
        assert message.starts[0].traceparent.startswith(f"00-{TRACE}-")
        assert message.starts[1].traceparent == ""
        sample = StepSample(5, 1000, 10, 2, 2, 2, wire_ns=5, queue_ns=1, prepare_ns=2)
        sample.forward_ns, sample.sample_ns = 30, 3
        step.end(sample)
    del other
    found = by_name(exporter)
    (span,) = found["octavo.scheduler.step"]
    assert span.context is not None and span.parent is None
    ids = {name: found[name][0].context for name in "abc"}
    linked = {link.context.span_id for link in span.links}
    assert linked == {ids["a"].span_id, ids["b"].span_id}  # type: ignore[union-attr]
    for name, count in (("a", 1), ("b", 1), ("c", 0)):
        back = [link.context.span_id for link in found[name][0].links]
        assert back == [span.context.span_id] * count
    assert (span.start_time, span.end_time) == (1000, 1051)
    (plan_span,), (wait,) = found["octavo.scheduler.plan"], found["octavo.scheduler.wait"]
    assert (plan_span.start_time, plan_span.end_time) == (1000, 1010)
    assert (wait.start_time, wait.end_time) == (1010, 1051)
    for child in (plan_span, wait):
        assert child.parent is not None and child.parent.span_id == span.context.span_id
    sent = parent_context(message.traceparent)
    assert sent and f"{span.context.span_id:016x}" in message.traceparent


def test_a_request_links_to_its_first_steps_only(
    spans: Spans, exporter: InMemorySpanExporter
) -> None:
    seq = sequence("a")
    with spans.serve("a", "a", NO_METADATA):
        for number in range(200):
            step = spans.begin_step("e", record(seq), number, 1)
            assert step is not None
            step.end(StepSample(5, number, 1, 1, 0, 1))
    found = by_name(exporter)
    steps = {span.context.span_id: span.start_time for span in found["octavo.scheduler.step"]}  # type: ignore[union-attr]
    linked = [steps[link.context.span_id] for link in found["a"][0].links]
    assert linked == list(range(128))


def test_a_step_that_is_lost_is_an_error(spans: Spans, exporter: InMemorySpanExporter) -> None:
    with spans.serve("a", "a", NO_METADATA):
        step = spans.begin_step("e", record(sequence("a")), 1, 1)
        assert step is not None
        step.fail("it died")
    (span,) = by_name(exporter)["octavo.scheduler.step"]
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "it died"


def test_an_id_in_use_keeps_its_own_span(spans: Spans) -> None:
    with spans.serve("a", "a", METADATA):
        with spans.serve("a", "a", NO_METADATA):
            assert spans.trace_id("a") == TRACE
        assert spans.trace_id("a") == TRACE
    assert spans.trace_id("a") == ""


def test_off_does_nothing() -> None:
    spans = Spans()
    with spans.serve("a", "a", METADATA) as request:
        assert request is None
        assert spans.begin_step("e", record(sequence("a")), 1, 1) is None
        assert spans.trace_id("a") == ""
    spans.close()
