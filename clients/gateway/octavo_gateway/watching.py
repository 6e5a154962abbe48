"""What the console's page follows: a scheduler's snapshots, as lines that never end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from octavo_client import AsyncClient, Snapshot

from octavo_gateway.errors import SERVER_ERROR, ApiError, invalid, translated
from octavo_gateway.exchange import ClientGone, Exchange
from octavo_gateway.frames import FrameEncoder
from octavo_gateway.names import FieldNames

MIN_INTERVAL_MS, DEFAULT_INTERVAL_MS, MAX_INTERVAL_MS = 100, 500, 60_000
WATCH_SECONDS = 3600.0  # then the page asks anew
_SILENCE_SECONDS = 15.0  # more than the interval, and the scheduler counts as silent
_SEND_SECONDS = 30.0  # for a reader to take one line
# No wait in a watch is longer than this in all, whatever the interval.
LIMIT_SECONDS = WATCH_SECONDS + MAX_INTERVAL_MS / 1000 + _SILENCE_SECONDS + _SEND_SECONDS
_RETRY_SECONDS = 5.0
_MAX_DIGITS = 9
_NAMES = FieldNames()


class Watchers:
    """Everybody who watches through this gateway.

    Each has a watch of its own at the scheduler, with the caller's own key, and of each at most
    one line is under way: the next snapshot is asked for when it was taken.

    Invariant: `num_watching` is at most the bound, and counts watches that have not ended.
    """

    def __init__(self, client: AsyncClient, *, most: int, send_seconds: float = _SEND_SECONDS):
        self._client = client
        self._most = most
        self._send_seconds = send_seconds
        self.num_watching = 0

    async def watch(self, exchange: Exchange) -> None:
        """Send a line per snapshot, until WATCH_SECONDS have passed.

        Raises:
            ApiError: 400 for the interval, 503 if there are too many, 504 for a silent
                scheduler, and for what the scheduler refuses.
            ClientGone: if the reader does not take a line in time.
        """
        key = exchange.api_key()
        interval_ms = _interval_ms(exchange.query.get("interval_ms"))
        with self._entry():
            await self._lines(exchange, key, interval_ms / 1000)

    async def _lines(self, exchange: Exchange, key: str | None, interval: float) -> None:
        encoder = FrameEncoder()
        end = time.monotonic() + WATCH_SECONDS
        watching = self._client.watch(
            interval=interval,
            sequences=True,
            blocks=True,
            api_key=key,
            timeout=LIMIT_SECONDS,
        )
        async with aclosing(watching) as snapshots:
            while time.monotonic() < end:
                snapshot = await _next(snapshots, interval + _SILENCE_SECONDS)
                if snapshot is None:  # the scheduler ends in good order
                    raise _away("the scheduler is stopping")
                await self._send(exchange, encoder.encode(snapshot))
        await exchange.end()

    async def _send(self, exchange: Exchange, line: bytes) -> None:
        try:
            async with asyncio.timeout(self._send_seconds):
                await exchange.line(line)
        except TimeoutError:
            raise ClientGone from None

    @contextmanager
    def _entry(self) -> Iterator[None]:
        if self.num_watching >= self._most:
            raise ApiError(
                503,
                f"{self._most} consoles watch through this gateway already: close one, or start "
                "the gateway with a larger --max-console-watchers",
                kind=SERVER_ERROR,
                code="too_many_watchers",
                retry_after=_RETRY_SECONDS,
            )
        self.num_watching += 1
        try:
            yield
        finally:
            self.num_watching -= 1


async def _next(snapshots: AsyncGenerator[Snapshot], seconds: float) -> Snapshot | None:
    try:
        with translated(_NAMES):
            async with asyncio.timeout(seconds):
                return await anext(snapshots, None)
    except TimeoutError:
        raise _away(f"the scheduler sent no snapshot for {seconds:g} s", status=504) from None


def _away(message: str, *, status: int = 503) -> ApiError:
    code = "unavailable" if status == 503 else "deadline_exceeded"
    return ApiError(status, message, kind=SERVER_ERROR, code=code, retry_after=_RETRY_SECONDS)


def _interval_ms(given: str | None) -> int:
    """Read the interval.

    Raises:
        ApiError: 400, naming the bound.
    """
    if given is None:
        return DEFAULT_INTERVAL_MS
    is_number = given.isascii() and given.isdecimal() and len(given) <= _MAX_DIGITS
    if not is_number or not MIN_INTERVAL_MS <= int(given) <= MAX_INTERVAL_MS:
        raise invalid(
            "interval_ms",
            f"must be a whole number between {MIN_INTERVAL_MS} and {MAX_INTERVAL_MS}, "
            f"got {given[:80]!r}",
        )
    return int(given)
