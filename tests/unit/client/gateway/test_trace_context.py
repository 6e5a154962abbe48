"""The caller's trace, from HTTP headers to what runs inside, and the gateway's own spans."""

from __future__ import annotations

from typing import Any

import pytest
from octavo.tracing import Tracing
from octavo_gateway.tracing import TraceContext
from opentelemetry import trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, StatusCode
from starlette.types import Message, Receive, Scope, Send

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"


class Inside:
    """An app that answers with a status and remembers in whose trace it ran."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.seen: SpanContext | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen = trace.get_current_span().get_span_context()
        if self.status == 0:
            raise RuntimeError("a fault of ours")
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"secret answer"})


async def call(
    inside: Inside, tracing: Tracing | None, path: str = "/v1/completions", flags: str = "01"
) -> list[Message]:
    headers = [(b"traceparent", f"00-{TRACE}-{CALLER}-{flags}".encode())]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "headers": headers}
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await TraceContext(inside, tracing)(scope, receive, send)
    assert not trace.get_current_span().get_span_context().is_valid, "nothing is left behind"
    return sent


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    return Tracing(SimpleSpanProcessor(exporter), "test", "one")


async def test_without_an_exporter_the_callers_context_passes_through() -> None:
    inside = Inside()
    sent = await call(inside, None)
    assert inside.seen is not None
    assert (f"{inside.seen.trace_id:032x}", f"{inside.seen.span_id:016x}") == (TRACE, CALLER)
    assert len(sent) == 2


async def test_with_one_the_gateway_stands_between(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    inside = Inside()
    await call(inside, tracing)
    (span,) = exporter.get_finished_spans()
    assert span.parent is not None and span.context is not None and inside.seen is not None
    assert f"{span.parent.span_id:016x}" == CALLER
    assert inside.seen.span_id == span.context.span_id
    attributes = dict(span.attributes or {})
    assert attributes["http.response.status_code"] == 200
    assert "secret" not in span.to_json()


@pytest.mark.parametrize("status", [500, 503])
async def test_a_fault_of_the_server_is_an_error(
    tracing: Tracing, exporter: InMemorySpanExporter, status: int
) -> None:
    await call(Inside(status), tracing)
    assert exporter.get_finished_spans()[0].status.status_code is StatusCode.ERROR


async def test_an_exception_ends_the_span_and_goes_on(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    with pytest.raises(RuntimeError):
        await call(Inside(0), tracing)
    assert len(exporter.get_finished_spans()) == 1


async def test_a_refusal_is_the_callers_and_no_error(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    await call(Inside(400), tracing)
    assert exporter.get_finished_spans()[0].status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("path", ["/health", "/metrics", "/console/watch"])
async def test_what_machines_ask_for_all_the_time_has_no_span(
    tracing: Tracing, exporter: InMemorySpanExporter, path: str
) -> None:
    await call(Inside(), tracing, path)
    assert exporter.get_finished_spans() == ()


async def test_a_caller_that_is_not_recorded_is_not(
    tracing: Tracing, exporter: InMemorySpanExporter
) -> None:
    inside = Inside()
    await call(inside, tracing, flags="00")
    assert exporter.get_finished_spans() == ()
    assert inside.seen is not None and f"{inside.seen.trace_id:032x}" == TRACE
