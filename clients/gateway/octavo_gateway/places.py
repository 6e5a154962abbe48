"""How many calls of one HTTP request run side by side: as many as the scheduler has room for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from octavo_gateway.errors import ApiError

_TOO_MANY_REQUESTS = 429

T = TypeVar("T")


class Places:
    """Lets calls run side by side, and fewer of them once one is refused for want of room.

    What is refused while others of the same request run is tried again when one of them has
    ended: to give up would throw away what they did. A call is refused before its first event.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_running = 0
        self._changed = asyncio.Condition()

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run one call in its turn.

        Raises:
            ApiError: what the call failed with; a refusal only if nothing else ran.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._num_running < self._most)
                self._num_running += 1
            try:
                return await call()
            except ApiError as error:
                if error.status != _TOO_MANY_REQUESTS or self._num_running == 1:
                    raise
                self._most = self._num_running - 1
            finally:
                async with self._changed:
                    self._num_running -= 1
                    self._changed.notify_all()
