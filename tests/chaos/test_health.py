"""What a scheduler says of its health, and what comes after an executor's death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from octavo_client import AsyncClient, Health

from tests.chaos.catalogue import difference, make_entries, record
from tests.chaos.clients import PATIENT, Crowd, follow, use_sdk
from tests.chaos.conftest import MakeStack
from tests.chaos.ledger import Ledger
from tests.chaos.processes import health_of

NUM_CLIENTS = 24
NUM_AFTER = 150
LONG = 300.0


async def until(probe: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """Whether it comes true in time."""
    give_up = time.monotonic() + seconds
    while not await probe():
        if time.monotonic() > give_up:
            return False
        await asyncio.sleep(0.1)
    return True


async def test_a_hung_executor_is_not_serving_and_a_busy_one_is(make_stack: MakeStack) -> None:
    """More requests than fit keep it SERVING; a process stopped in mid-step does not.

    When it goes on, so does the stream, with the tokens of an undisturbed run.
    """
    async with (
        make_stack(num_executors=1, num_schedulers=1, has_gateway=False, num_blocks=64) as stack,
        AsyncClient(stack.target, retry=PATIENT) as client,
    ):
        (scheduler,), (executor,) = stack.schedulers, stack.executors
        entries = await record(client, make_entries(copies=1))
        crowd = Crowd(Ledger(), seed=4)
        clients = [
            asyncio.create_task(use_sdk(crowd, f"c{number}", stack.target, entries))
            for number in range(NUM_CLIENTS)
        ]
        seen = []
        for _ in range(30):
            seen.append(await health_of(scheduler.address))
            await asyncio.sleep(0.1)
        (held,) = await stack.held_by(scheduler)
        assert held.num_queued + held.num_preempted > 0, "it was never under pressure"
        assert set(seen) == {Health.SERVING}

        async def says(health: Health) -> bool:
            return await health_of(scheduler.address) is health

        executor.freeze()
        assert await until(lambda: says(Health.NOT_SERVING), 30)
        executor.resume()
        assert await until(lambda: says(Health.SERVING), 30)
        await crowd.rest(100)
        crowd.end()
        await asyncio.gather(*clients)
        assert crowd.ledger.problems == []
        assert stack.unasked_ends == []


async def test_all_requests_after_a_restart_are_answered(make_stack: MakeStack) -> None:
    """The first hundred and the ones after, one at a time and together, right to the token."""
    async with (
        make_stack(num_executors=1, num_schedulers=1, has_gateway=False) as stack,
        AsyncClient(stack.target, retry=PATIENT) as client,
    ):
        (executor,) = stack.executors
        entries = await record(client, make_entries(copies=1))
        executor.kill()
        await executor.wait_next(1)
        ledger = Ledger()
        turns = asyncio.Semaphore(8)

        async def ask(number: int) -> str | None:
            entry = entries[number % len(entries)]
            async with turns:
                record = ledger.open(f"r{number}", entry.kind)
                return difference(entry, await follow(client, entry, record, ledger))

        alone = [await ask(number) for number in range(len(entries))]
        rest = range(len(entries), NUM_AFTER)
        together = await asyncio.gather(*map(ask, rest))
        assert set(alone + together) == {None}
