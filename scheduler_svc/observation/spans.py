"""Spans of requests and of steps (docs/observability.md); all of it does nothing when off.

A request's span is the parent of what executors do for it alone, and a step links with each
request in it. Attribute names are those of OpenTelemetry's GenAI conventions, version 1.37,
and `octavo.*` for what those have no name for. No prompt and no output is ever in a span.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from octavo.tracing import Tracing, parent_context, traceparent_of
from octavo.v1 import executor_pb2 as pb

from scheduler_svc.core.step import StepPlan, StepRecord
from scheduler_svc.errors import OctavoError
from scheduler_svc.observation.step_sample import StepSample

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

_MAX_STEP_LINKS = 128
"""Of a request to the steps that it was in: the first ones. As many as the SDK keeps."""

Value = str | int | float | bool | list[str]


class RequestSpan:
    """The server span of one request."""

    def __init__(self, span: Span) -> None:
        """Own a span that was started."""
        self._span = span
        self.num_step_links = 0
        self.traceparent = traceparent_of(span)

    @property
    def span(self) -> Span:
        """The span itself."""
        return self._span

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        """Add attributes; those that are None are left out."""
        known = {name: value for name, value in attributes.items() if value is not None}
        self._span.set_attributes(known)

    def link_to(self, step: Span) -> None:
        """Link to a step that the request is in, if it is one of the first."""
        if self.num_step_links < _MAX_STEP_LINKS:
            self.num_step_links += 1
            self._span.add_link(step.get_span_context())


class StepSpan:
    """The span of one step, from its plan to its result."""

    def __init__(
        self,
        tracer: Tracer,
        span: Span,
        planned_unix_ns: int,
        plan_ns: int,
        traceparents: Mapping[str, str],
    ) -> None:
        """Own a span that was started; `traceparents` are those of its requests by id."""
        self._tracer = tracer
        self._span = span
        self._planned_unix_ns = planned_unix_ns
        self._traceparents = traceparents
        self._child("octavo.scheduler.plan", planned_unix_ns, planned_unix_ns + plan_ns)

    def send_with(self, plan: StepPlan, message: pb.StepPlan) -> None:
        """Give the executor the contexts: of the step, and of the requests that start."""
        message.traceparent = traceparent_of(self._span)
        for start, sent in zip(plan.starts, message.starts, strict=True):
            request_id = start.sequence.group.request.request_id
            sent.traceparent = self._traceparents.get(request_id, "")

    def end(self, sample: StepSample) -> None:
        """The result is here."""
        phases = ("plan", "wire", "queue", "prepare", "forward", "sample")
        found = {f"octavo.step.{name}_ns": getattr(sample, f"{name}_ns") for name in phases}
        self._span.set_attributes({**found, "octavo.step.idle_ns": sample.idle_ns})
        planned = self._planned_unix_ns
        end = planned + sum(found.values())
        self._child("octavo.scheduler.wait", planned + sample.plan_ns, end)
        self._span.end(end)

    def fail(self, reason: str) -> None:
        """There will be none."""
        _set_error(self._span, "ExecutorLost", reason)
        self._span.end()

    def _child(self, name: str, begin: int, end: int) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(self._span, Context())
        self._tracer.start_span(name, context, start_time=begin).end(end)


class Spans:
    """The spans that are open. Without a tracer there are none."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        """Trace with this, or not at all."""
        self._tracing = tracing
        self._requests: dict[str, RequestSpan] = {}

    def close(self) -> None:
        """Send what is left."""
        if self._tracing is not None:
            self._tracing.close()

    # -- requests ------------------------------------------------------------------

    @contextmanager
    def serve(
        self, request_id: str, name: str, metadata: Iterable[tuple[str, str | bytes]]
    ) -> Iterator[RequestSpan | None]:
        """Be the span of one call; an error that leaves the block is told.

        Args:
            request_id: of the request.
            name: of the span.
            metadata: of the call, with the caller's trace context if it has one.
        """
        if self._tracing is None:
            yield None
            return
        from opentelemetry.trace import SpanKind

        headers = {key: value for key, value in metadata if isinstance(value, str)}
        parent = parent_context(headers.get("traceparent", ""), headers.get("tracestate", ""))
        told = {"octavo.request_id": request_id}
        span = self._tracing.tracer.start_span(name, parent, SpanKind.SERVER, told)
        if not span.is_recording():
            yield None
            return
        request = RequestSpan(span)
        self._requests.setdefault(request_id, request)  # an id in use is refused later
        try:
            yield request
        except OctavoError as error:
            _set_error(span, type(error).__name__, str(error))
            raise
        except BaseException as error:  # the caller hung up, or it is a fault of ours
            _set_error(span, type(error).__name__, "")
            raise
        finally:
            span.end()
            if self._requests.get(request_id) is request:
                del self._requests[request_id]

    def trace_id(self, request_id: str) -> str:
        """Give the id of a request's trace as 32 hexadecimal digits; "" if there is none."""
        request = self._requests.get(request_id)
        return request.traceparent.split("-")[1] if request is not None else ""

    def note(
        self, request_id: str, name: str, time_unix_ns: int, attributes: Mapping[str, Value]
    ) -> None:
        """Add an event to a request's span."""
        request = self._requests.get(request_id)
        if request is not None:
            told = {f"octavo.{key}": value for key, value in attributes.items() if value}
            request.span.add_event(f"octavo.{name}", told, time_unix_ns)

    # -- steps ---------------------------------------------------------------------

    def begin_step(
        self, executor: str, record: StepRecord, planned_unix_ns: int, plan_ns: int
    ) -> StepSpan | None:
        """Begin the span of a step, if one of its requests is traced.

        Args:
            executor: address that the plan goes to.
            record: the step.
            planned_unix_ns: when planning began.
            plan_ns: how long it took.
        """
        if self._tracing is None or not self._requests:
            return None
        ids = _request_ids(record)
        requests = {name: self._requests[name] for name in ids if name in self._requests}
        if not requests:
            return None
        from opentelemetry.context import Context
        from opentelemetry.trace import Link

        links = [Link(request.span.get_span_context()) for request in requests.values()]
        span = self._tracing.always.start_span(
            "octavo.scheduler.step",
            Context(),
            attributes={
                "octavo.executor": executor,
                "octavo.step.id": record.step_id,
                "octavo.step.num_tokens": record.num_tokens,
                "octavo.step.num_sampled": len(record.sampled),
                "octavo.step.num_requests": len(ids),
            },
            links=links,
            start_time=planned_unix_ns,
        )
        for request in requests.values():
            request.link_to(span)
        told = {request_id: request.traceparent for request_id, request in requests.items()}
        return StepSpan(self._tracing.always, span, planned_unix_ns, plan_ns, told)


def _request_ids(record: StepRecord) -> list[str]:
    """Requests that a step computes something for, each once."""
    groups = dict.fromkeys(seq.group for seq in record.sampled)
    groups.update(dict.fromkeys(seq.group for seq, _, _ in record.chunks))
    return [group.request.request_id for group in groups]


def _set_error(span: Span, kind: str, message: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message))
