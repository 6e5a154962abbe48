"""The caller's trace, taken from HTTP and handed on to the scheduler.

With the standard variables (octavo/tracing.py) the gateway has a server span of its own for
every request; without them the caller's context passes through as it is.
"""

from __future__ import annotations

from octavo.tracing import Tracing, parent_context
from opentelemetry import context as current
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_QUIET_PATHS = ("/health", "/metrics", "/console")
"""Asked for by machines, all the time: no spans of these."""


class TraceContext:
    """ASGI middleware: what runs inside runs in the caller's trace."""

    def __init__(self, app: ASGIApp, tracing: Tracing | None) -> None:
        """Wrap an app; without `tracing` there are no spans of the gateway's own."""
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        parent = parent_context(headers.get("traceparent", ""), headers.get("tracestate", ""))
        is_quiet = str(scope["path"]).startswith(_QUIET_PATHS)
        if self._tracing is not None and not is_quiet:
            await self._serve(self._tracing, parent, scope, receive, send)
            return
        token = current.attach(parent)
        try:
            await self._app(scope, receive, send)
        finally:
            current.detach(token)

    async def _serve(
        self,
        tracing: Tracing,
        parent: current.Context,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        method = str(scope["method"])
        attributes = {"http.request.method": method, "url.path": str(scope["path"])}
        span = tracing.tracer.start_span(method, parent, SpanKind.SERVER, attributes=attributes)

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = int(message["status"])
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(Status(StatusCode.ERROR))
            await send(message)

        token = current.attach(set_span_in_context(span, parent))
        try:
            await self._app(scope, receive, note)
        finally:
            current.detach(token)
            route = getattr(scope.get("route"), "path", None)
            if route is not None:
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", str(route))
            span.end()
