"""One HTTP request and its answer, over ASGI: read within bounds, written as it comes."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import to_json
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from octavo_gateway.errors import ApiError

_BODY_SECONDS = 60.0
_MAX_KEY_CHARACTERS = 4096
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_KEY = re.compile(r"[\x21-\x7e]+")
_JSON = "application/json"
_SSE = "text/event-stream; charset=utf-8"
_LINES = "application/x-ndjson"
# A proxy that gathers what it passes on would spoil a stream.
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
CLIENT_GONE = 499  # nobody gets it: for metrics and logs


class ClientGone(Exception):
    """Whoever asked has hung up; there is nobody to answer."""


def request_id_of(headers: Headers) -> str:
    """Give the caller's own id, so that its logs and ours have the same; or draw one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


class Exchange:
    """One request and its answer.

    Attributes:
        query: the parameters in the URL.
        request_id: the caller's own x-request-id, if it is fit for a header; else drawn.
        status: of the answer, once it began; 0 before.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.path_params: Mapping[str, Any] = scope.get("path_params", {})
        self.headers = Headers(scope=scope)
        self.query = QueryParams(scope.get("query_string", b""))
        self.request_id = request_id_of(self.headers)
        self.status = 0
        self._in_stream: Callable[[object], bytes] | None = None  # how a stream writes JSON

    @property
    def has_begun(self) -> bool:
        """Whether any part of the answer was sent."""
        return self.status != 0

    def api_key(self) -> str | None:
        """Give the key of `Authorization: Bearer KEY`; None if there is no such header.

        Raises:
            ApiError: 401, if the header is of another form.
        """
        headers = self.headers.getlist("authorization")
        if not headers:
            return None
        # Of several one would count here, and another for a proxy.
        header = headers[0] if len(headers) == 1 else ""
        scheme, _, key = header.replace("\t", " ").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not _KEY.fullmatch(key) or len(key) > _MAX_KEY_CHARACTERS:
            raise ApiError(
                401,
                "the Authorization header must be: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return key

    async def body(self, max_bytes: int) -> bytes:
        """Read the whole body.

        Raises:
            ApiError: 413 past `max_bytes`, 408 if it does not come.
            ClientGone: if the caller hung up.
        """
        too_large = ApiError(
            413, f"the body must be at most {max_bytes} bytes", code="request_too_large"
        )
        length = self.headers.get("content-length", "")
        if length.isascii() and length.isdecimal() and int(length[:20]) > max_bytes:
            raise too_large
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > max_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            raise ApiError(
                408, f"the body must arrive within {_BODY_SECONDS:g} s", code="body_timeout"
            ) from None

    async def disconnected(self) -> None:
        """Return when the caller has hung up; only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self,
        payload: object,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a whole answer of JSON."""
        await self.answer_bytes(to_json(payload), _JSON, status=status, headers=headers)

    async def answer_bytes(
        self,
        body: bytes,
        media_type: str,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a whole answer."""
        length = {"content-length": str(len(body))}
        await self._begin(status, media_type, {**length, **(headers or {})})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def event(self, payload: object) -> None:
        """Send one server-sent event; the first one begins the answer.

        It waits while the caller reads more slowly than it is written to.
        """
        await self._more(_as_event(payload), _SSE, _as_event)

    async def end_events(self) -> None:
        """Send the last event, and end."""
        frame = b"data: [DONE]\n\n"
        await self._send({"type": "http.response.body", "body": frame, "more_body": False})

    async def line(self, line: bytes) -> None:
        """Send one line of JSON, given without its end; it begins and waits as `event` does."""
        await self._more(line + b"\n", _LINES, _as_line)

    async def end(self) -> None:
        """End a stream that has no last word."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """Answer with an error; in a stream it is the last event, or line."""
        if not self.has_begun:
            await self.answer(error.body, status=error.status, headers=error.headers)
        elif self._in_stream is not None:
            frame = self._in_stream(error.body)
            await self._send({"type": "http.response.body", "body": frame, "more_body": True})
            await self.end()

    async def _more(
        self, frame: bytes, media_type: str, in_stream: Callable[[object], bytes]
    ) -> None:
        if not self.has_begun:
            self._in_stream = in_stream
            await self._begin(200, media_type, _STREAM_HEADERS)
        await self._send({"type": "http.response.body", "body": frame, "more_body": True})

    async def _begin(self, status: int, media_type: str, headers: Mapping[str, str]) -> None:
        self.status = status
        all_headers = {
            "content-type": media_type,
            "x-request-id": self.request_id,
            **headers,
        }
        raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in all_headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


def _as_event(payload: object) -> bytes:
    return b"data: %b\n\n" % to_json(payload)


def _as_line(payload: object) -> bytes:
    return to_json(payload) + b"\n"
