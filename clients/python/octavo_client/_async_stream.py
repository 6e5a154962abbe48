"""One request's events, for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from grpc import aio
from octavo.v1 import inference_pb2

from octavo_client import _protocol
from octavo_client._session import Session, name_deadline
from octavo_client._status import error_from_status
from octavo_client._types import Completion, Event
from octavo_client.errors import Cancelled, OctavoError

_Call = aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


class AsyncStream:
    """Events of one request, in order. Iterate once; `async with` cancels what is left."""

    def __init__(
        self,
        open_call: Callable[[inference_pb2.GenerateRequest, float], _Call],
        session: Session,
        seconds: float,
        target: str,
        on_retry: Callable[[OctavoError], None] | None = None,
    ) -> None:
        self._open_call = open_call
        self._session = session
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._target = target
        self._on_retry = on_retry
        self._call: _Call | None = None
        self._ready: deque[Event] = deque()
        self._ended = False
        self._cancelled = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            await self._advance()
        return self._ready.popleft()

    def cancel(self) -> None:
        """Stop generating and free the blocks; iteration ends. Harmless when repeated."""
        if self._ended:
            return
        self._session.cancel()
        self._ended = True
        self._cancelled.set()
        self._ready.clear()
        if self._call is not None:
            self._call.cancel()

    async def completion(self) -> Completion:
        """Read the rest, and return the whole answer; for streams not iterated before.

        Raises: Cancelled: if `cancel` came first.
        """
        builder = _protocol.CompletionBuilder()
        async for event in self:
            builder.add(event)
        if self._cancelled.is_set():
            raise Cancelled("the stream was cancelled")
        return builder.build()

    async def _advance(self) -> None:
        """Read one response, or go on to the next call; fill `_ready` or end."""
        if self._call is None:
            seconds = self._deadline - time.monotonic()
            self._call = self._open_call(self._session.next_request(), max(seconds, 0.0))
        try:
            response = await self._call.read()
            if isinstance(response, inference_pb2.GenerateResponse):
                self._ready.extend(self._session.receive(response))
            else:  # aio.EOF
                self._end(self._session.finish())
        except aio.AioRpcError as failure:
            await self._recover(translate(failure, self._target))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._cancelled.is_set() and not (task and task.cancelling()):
                return  # our own cancel(): the iteration just ends
            self.cancel()
            raise
        except OctavoError:
            self.cancel()
            raise

    async def _recover(self, error: OctavoError) -> None:
        """Wait before the next call, or raise."""
        self._call = None
        if self._cancelled.is_set():
            return
        now = time.monotonic()
        error = name_deadline(error, now, self._deadline, self._seconds)
        try:
            delay = self._session.after_failure(error, now)
        except OctavoError:
            self._ended = True
            raise
        if delay is None:
            self._end(self._session.finish())
            return
        if time.monotonic() + delay >= self._deadline:
            self._ended = True
            self._session.give_up(error)
            raise error
        if self._on_retry is not None and self._session.is_new_outage:
            self._on_retry(error)
        try:
            await asyncio.wait_for(self._cancelled.wait(), delay)
        except TimeoutError:
            return

    def _end(self, events: Iterable[Event]) -> None:
        self._ready.extend(events)
        self._ended = True


def translate(failure: aio.AioRpcError, target: str) -> OctavoError:
    """Read what gRPC raised."""
    message = failure.details() or failure.code().name
    trailers: Any = failure.trailing_metadata() or ()  # pairs, whatever the stubs say
    return error_from_status(failure.code(), message, trailers, target)
