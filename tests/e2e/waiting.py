"""Waiting for a service to come to rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from octavo_client import AsyncClient


async def until(is_so: Callable[[], Awaitable[bool]], seconds: float) -> None:
    """Wait until something is so, asked ten times a second.

    Raises:
        AssertionError: if that takes longer.
    """
    for _ in range(int(seconds / 0.1)):
        if await is_so():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{is_so.__name__}: not within {seconds:g} s")


async def until_free(client: AsyncClient, seconds: float = 20.0) -> int:
    """Wait until no block is referenced; return the step that was planned last.

    Raises:
        AssertionError: if that takes longer.
    """
    for _ in range(int(seconds / 0.01)):
        executor = (await client.snapshot()).executors[0]
        if executor.pool.num_referenced == 0 and executor.num_running == 0:
            return executor.step_id
        await asyncio.sleep(0.01)
    raise AssertionError(f"blocks are still held: {executor.pool}")
