"""The caller's traces go on into the service, where the program uses OpenTelemetry.

The SDK never imports it by itself: a program that traces has imported it before its first
call. Names are those of its GenAI conventions, version 1.37.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from octavo.v1 import inference_pb2

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Headers = tuple[tuple[str, str], ...]


class CallSpan:
    """The client span of one request, over all the calls that it takes.

    Attributes:
        headers: what every call brings along, so that the service's spans are its children.
    """

    def __init__(self, span: Span | None) -> None:
        """Own a span that was started; None: there is none."""
        self._span = span
        self.headers = _headers(span)

    @classmethod
    def begin(cls, request: inference_pb2.GenerateRequest) -> CallSpan:
        """Begin a span below the caller's current one."""
        if "opentelemetry.trace" not in sys.modules:
            return cls(None)
        from opentelemetry import trace

        is_chat = request.WhichOneof("prompt") == "chat"
        operation = "chat" if is_chat else "text_completion"
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "octavo",
        }
        if request.model:
            attributes["gen_ai.request.model"] = request.model
        if request.request_id:
            attributes["octavo.request_id"] = request.request_id
        name = f"{operation} {request.model}".rstrip()
        tracer = trace.get_tracer("octavo_client")
        return cls(tracer.start_span(name, kind=trace.SpanKind.CLIENT, attributes=attributes))

    def note_started(self, request_id: str, model: str) -> None:
        """The service has taken the request."""
        if self._span is not None:
            self._span.set_attribute("gen_ai.response.id", request_id)
            self._span.set_attribute("gen_ai.response.model", model)

    def note_retry(self, error: Exception) -> None:
        """A call broke, and another one will follow."""
        if self._span is not None:
            told = {"error.type": type(error).__name__, "octavo.detail": str(error)}
            self._span.add_event("octavo.retried", told)

    def end(self, error: Exception | None = None, *, is_cancelled: bool = False) -> None:
        """The request has ended; harmless when repeated."""
        span, self._span = self._span, None
        if span is None:
            return
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        if is_cancelled:
            span.set_attribute("octavo.cancelled", True)
        span.end()


def _headers(span: Span | None) -> Headers:
    if span is None:
        return ()
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return tuple(carrier.items())
