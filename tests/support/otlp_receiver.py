"""A collector of OpenTelemetry that keeps what it is sent: spans, as the wire has them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Span:
    """One span, and the service that sent it; ids are hexadecimal."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, object]
    events: tuple[str, ...]
    links: tuple[str, ...]
    is_error: bool

    @property
    def took_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass
class Receiver(service_grpc.TraceServiceServicer):
    """Answers TraceService.Export."""

    port: int = 0
    spans: list[Span] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(  # gRPC's name
        self, request: service.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> service.ExportTraceServiceResponse:
        found = [
            _read(resource, span)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._changed:
            self.spans += found
            self._changed.notify_all()
        return service.ExportTraceServiceResponse()

    def wait(self, is_enough: Callable[[list[Span]], bool], seconds: float = 20.0) -> list[Span]:
        """Wait until enough is here; gives all spans so far, enough or not."""
        give_up = time.monotonic() + seconds
        with self._changed:
            while not is_enough(self.spans) and (left := give_up - time.monotonic()) > 0:
                self._changed.wait(left)
            return list(self.spans)


def _read(resource: trace_pb2.ResourceSpans, span: trace_pb2.Span) -> Span:
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    return Span(
        service=names["service.name"],
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes={each.key: _value(each.value) for each in span.attributes},
        events=tuple(event.name for event in span.events),
        links=tuple(link.span_id.hex() for link in span.links),
        is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _value(value: object) -> object:
    kind = value.WhichOneof("value")  # type: ignore[attr-defined]
    return getattr(value, kind) if kind else None


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Listen on loopback."""
    receiver = Receiver()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    service_grpc.add_TraceServiceServicer_to_server(receiver, server)
    receiver.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None)
