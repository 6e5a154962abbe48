"""A request that kills the executor it runs on: it is found and given up, and nobody else is."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path

import pytest
from octavo_client import NO_RETRIES, AsyncClient
from octavo_client.errors import Internal

from tests.chaos import poisoned_executor
from tests.chaos.catalogue import make_entries, record
from tests.chaos.clients import PATIENT, Crowd, use_sdk
from tests.chaos.conftest import MakeStack
from tests.chaos.ledger import Ledger
from tests.chaos.poisoned_executor import LOST, POISON
from tests.chaos.processes import Service

NUM_CLIENTS = 6
MAX_DEATHS = 3
MODULE = "poisoned_executor"


@pytest.fixture(autouse=True)
def poisoned_on_the_path(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the services' interpreter find the module alone, without the repository's root."""
    folder = tmp_path_factory.mktemp("modules")
    shutil.copy(Path(poisoned_executor.__file__), folder / f"{MODULE}.py")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.mark.slow
async def test_who_kills_executors_is_given_up_and_nobody_else(make_stack: MakeStack) -> None:
    """INTERNAL after at most three deaths; all streams beside it end as undisturbed."""
    async with (
        make_stack(num_schedulers=1, has_gateway=False, executor_module=MODULE) as stack,
        AsyncClient(stack.target, retry=PATIENT) as client,
    ):
        entries = await record(client, make_entries(copies=1))
        ledger = Ledger()
        crowd = Crowd(ledger, seed=3)
        others = [
            asyncio.create_task(use_sdk(crowd, f"c{number}", stack.target, entries))
            for number in range(NUM_CLIENTS)
        ]
        await asyncio.sleep(1.0)
        with pytest.raises(Internal):
            await client.generate(tokens=(40, 41, *POISON, 42), max_tokens=8, timeout=200)
        await crowd.rest(100)
        crowd.end()
        await asyncio.gather(*others)
        num_deaths = sum(service.incarnation - 1 for service in stack.executors)
        assert ledger.problems == []
        assert ledger.num_streams.total() >= NUM_CLIENTS
        assert 1 <= num_deaths <= MAX_DEATHS
        assert {end.partition(" (")[0] for end in stack.unasked_ends} <= {
            f"executor-{number} ended with -9" for number in range(2)
        }


async def ended(service: Service, seconds: float = 30.0) -> int | None:
    """Wait for the end of a service's first process; its exit status."""
    give_up = time.monotonic() + seconds
    while service.last_exit is None and time.monotonic() < give_up:
        await asyncio.sleep(0.05)
    return service.last_exit


async def test_an_executor_whose_device_dies_exits_with_a_status(make_stack: MakeStack) -> None:
    """Not zero, so that an orchestrator starts it again, and with a word in its log."""
    async with make_stack(
        num_executors=1, num_schedulers=1, has_gateway=False, executor_module=MODULE
    ) as stack:
        (executor,) = stack.executors
        async with AsyncClient(stack.target, retry=NO_RETRIES) as client:
            asking = asyncio.create_task(client.generate(tokens=LOST, max_tokens=4))
            assert await ended(executor) == 1
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert '"device_died"' in executor.logs[0].read_text()
