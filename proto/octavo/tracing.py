"""Traces by OpenTelemetry: on where its standard variables ask for them, else not imported.

    OTEL_EXPORTER_OTLP_ENDPOINT, ..._TRACES_ENDPOINT   turn it on, and say where spans go
    OTEL_TRACES_EXPORTER                               otlp (also turns it on), console, none
    OTEL_SDK_DISABLED                                  true turns it off
    OTEL_TRACES_SAMPLER, OTEL_TRACES_SAMPLER_ARG       which requests; by default all, or as the
                                                       caller decided
    OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES        whose spans they are
    OTEL_EXPORTER_OTLP_HEADERS, ..._TIMEOUT, OTEL_BSP_... and the rest of the OTLP/gRPC exporter

Spans go out from a thread. One that cannot be sent in time is dropped and nobody waits.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

from octavo import otel_variables

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanProcessor
    from opentelemetry.trace import Span, SpanContext, Tracer

_CLOSE_SECONDS = 2.0
# It warns of every caller whose headers are wrong, in that caller's words.
logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
_EXPORTERS = ("otlp", "console", "none")


class TracingError(Exception):
    """The variables ask for what is not here; the text is one line for people."""


def exporter_name(environ: Mapping[str, str] = os.environ) -> str:
    """Say what the variables ask for: "otlp", "console" or "none".

    Raises:  TracingError: if that is something else.
    """
    if otel_variables.is_disabled(environ):
        return "none"
    name = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if not name:
        name = "otlp" if otel_variables.endpoint(environ, "traces") else "none"
    if name not in _EXPORTERS:
        raise TracingError(f"OTEL_TRACES_EXPORTER: {name!r}, must be otlp, console or none")
    foreign = otel_variables.foreign_protocol(environ, "traces") if name == "otlp" else None
    if foreign is not None:
        raise TracingError(f"{foreign[0]}: {foreign[1]!r}, must be grpc")
    return name


class Tracing:
    """Tracers and the thread behind them.

    Attributes:
        provider: of spans that the sampler decides about.
        tracer: the provider's.
        always: of spans that are recorded in any case, because of what they link to.
    """

    def __init__(self, processor: SpanProcessor, service: str, instance: str) -> None:
        """Hand spans of a service to a processor; `instance` names this process."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        found = {"service.instance.id": instance, "service.version": version("octavo")}
        resource = Resource.create(found)
        if _is_unnamed(resource.attributes):
            resource = resource.merge(Resource({"service.name": service}))
        self._processor = processor
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self.tracer = self._open(self.provider)
        self.always = self._open(TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False))

    def _open(self, provider: TracerProvider) -> Tracer:
        provider.add_span_processor(self._processor)
        return provider.get_tracer("octavo", version("octavo"))

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


def open_tracing(service: str, instance: str) -> Tracing | None:
    """Trace as the variables ask for; None if they do not.

    Raises:  TracingError: if they ask for what is not here.
    """
    name = exporter_name()
    if name == "none":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import (
            BatchSpanProcessor,
            ConsoleSpanExporter,
            SimpleSpanProcessor,
        )
    except ImportError as error:
        raise TracingError(
            f"traces are asked for and {error.name} is not installed: the extra otel brings it"
        ) from None
    try:
        if name == "console":
            return Tracing(SimpleSpanProcessor(ConsoleSpanExporter()), service, instance)
        return Tracing(BatchSpanProcessor(OTLPSpanExporter()), service, instance)
    except Exception as error:  # of the SDK's many variables, each in its own way
        raise TracingError(f"a variable OTEL_... cannot be used: {error}") from None


def traceparent_of(span: Span) -> str:
    """Write a span's context as W3C's traceparent."""
    context: SpanContext = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def parent_context(traceparent: str, tracestate: str = "") -> Context:
    """Read W3C's headers; what they do not say, or say wrongly, is no parent."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    return TraceContextTextMapPropagator().extract(carrier, Context())


def _is_unnamed(attributes: Mapping[str, object]) -> bool:
    return str(attributes.get("service.name", "unknown_service")).startswith("unknown_service")
