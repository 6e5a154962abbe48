"""The SDK's span of a request, for programs that use OpenTelemetry."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from octavo.v1 import inference_pb2, types_pb2
from octavo_client._retry import RetryPolicy
from octavo_client._session import Session
from octavo_client._tracing import CallSpan
from octavo_client.errors import InvalidArgument, Unavailable
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

REQUEST = inference_pb2.GenerateRequest(text="secret words", request_id="r", model="m")


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where the spans of a program with a provider of its own go."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


@pytest.fixture
def session(exporter: InMemorySpanExporter) -> Iterator[Session]:
    yield Session(REQUEST, RetryPolicy(), span=CallSpan.begin(REQUEST))


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def answer(session: Session) -> None:
    """Let the service answer in full."""
    finished = inference_pb2.Finished(reason=types_pb2.FINISH_REASON_LENGTH)
    for response in (
        inference_pb2.GenerateResponse(started=inference_pb2.Started(request_id="r", model="smol")),
        inference_pb2.GenerateResponse(delta=inference_pb2.Delta(token_ids=[5], text="x")),
        inference_pb2.GenerateResponse(finished=finished),
    ):
        session.receive(response)
    session.finish()


def test_the_service_is_told_whose_child_it_is(exporter: InMemorySpanExporter) -> None:
    """The header names the client's span, and that is a child of the caller's."""
    tracer = trace.get_tracer("program")
    with tracer.start_as_current_span("program") as mine:
        span = CallSpan.begin(REQUEST)
    ((name, value),) = span.headers
    span.end()
    told = exporter.get_finished_spans()[1]
    assert told.context is not None and told.parent is not None
    assert told.parent.span_id == mine.get_span_context().span_id
    ids = f"{told.context.trace_id:032x}-{told.context.span_id:016x}"
    assert name == "traceparent" and value.startswith(f"00-{ids}-")
    assert int(value[-2:], 16) & 1, "it is recorded"
    assert (told.name, told.kind) == ("text_completion m", SpanKind.CLIENT)


def test_a_request_that_ends_well_has_one_span(
    session: Session, exporter: InMemorySpanExporter
) -> None:
    answer(session)
    session.cancel()  # streams do so when they are left
    span = only(exporter)
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes or {})
    assert attributes["gen_ai.response.model"] == "smol"
    assert "octavo.cancelled" not in attributes
    assert "secret" not in span.to_json()


def test_retries_are_events_of_the_one_span(
    session: Session, exporter: InMemorySpanExporter
) -> None:
    session.next_request()
    assert session.after_failure(Unavailable("away"), 0.0) is not None
    session.next_request()
    answer(session)
    (event,) = only(exporter).events
    assert event.name == "octavo.retried"
    assert (event.attributes or {})["error.type"] == "Unavailable"


def test_what_no_retry_helps_is_the_spans_error(
    session: Session, exporter: InMemorySpanExporter
) -> None:
    with pytest.raises(InvalidArgument):
        session.after_failure(InvalidArgument("n must be at most 64"), 0.0)
    span = only(exporter)
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "InvalidArgument"


def test_a_cancelled_request_says_so(session: Session, exporter: InMemorySpanExporter) -> None:
    session.cancel()
    assert (only(exporter).attributes or {})["octavo.cancelled"] is True


def test_a_program_without_it_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not get it imported."""
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    span = CallSpan.begin(REQUEST)
    span.note_retry(Unavailable("x"))
    span.end()
    assert span.headers == ()
    assert "opentelemetry.trace" not in sys.modules
