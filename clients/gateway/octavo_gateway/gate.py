"""How many requests are in flight, and the end of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from octavo_gateway.errors import RETRY_SECONDS, SERVER_ERROR, ApiError

_CUT_OFF_SECONDS = 1.0  # for the last words of what is cut off


class Gate:
    """Lets requests in, up to a bound, until draining begins.

    Invariant: `num_inside` is the number of requests between their entry and their end,
    in whatever way they end.

    Attributes:
        closing: set when draining begins.
        cut_off: set when those that are still inside have to end.
    """

    def __init__(self, max_inside: int) -> None:
        self._max_inside = max_inside
        self._empty = asyncio.Event()
        self._empty.set()
        self.num_inside = 0
        self.is_draining = False
        self.closing = asyncio.Event()
        self.cut_off = asyncio.Event()

    @contextmanager
    def entry(self) -> Iterator[None]:
        """Count one request for as long as the block lasts.

        Raises:
            ApiError: 503 while draining, 429 if there are too many already.
        """
        if self.is_draining:
            raise draining()
        if self.num_inside >= self._max_inside:
            raise ApiError(
                429,
                f"{self._max_inside} requests are in flight already: come back later",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=RETRY_SECONDS,
            )
        self.num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self._empty.set()

    async def drain(self, seconds: float) -> int:
        """Let nobody in any more, wait for those inside, and cut off what takes longer.

        Returns: the number of requests that were cut off.
        """
        self.is_draining = True
        self.closing.set()
        if await self._is_empty_within(seconds):
            return 0
        num_cut_off = self.num_inside
        self.cut_off.set()
        await self._is_empty_within(_CUT_OFF_SECONDS)
        return num_cut_off

    async def _is_empty_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


def draining() -> ApiError:
    """Give the refusal of a gateway that is about to end."""
    return ApiError(
        503,
        "the gateway is stopping: go to another",
        kind=SERVER_ERROR,
        code="unavailable",
        retry_after=RETRY_SECONDS,
    )
