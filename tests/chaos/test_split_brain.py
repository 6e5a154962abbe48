"""Two schedulers that both believe they own the executor: it follows one of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from octavo_client import AsyncClient

from tests.chaos.catalogue import make_entries, record
from tests.chaos.clients import PATIENT, Crowd, use_sdk
from tests.chaos.conftest import MakeStack
from tests.chaos.ledger import Ledger
from tests.chaos.links import Way
from tests.chaos.processes import Service
from tests.chaos.rest import read_events, until_at_rest
from tests.chaos.stack import Stack

NUM_CLIENTS = 8
TAKEOVER_SECONDS = 60.0


async def owner_of(stack: Stack) -> Service | None:
    """The scheduler that holds the executor; None: nobody says so."""
    held = await stack.held()
    return next((each for each in stack.schedulers if held[each.name]), None)


async def until_owner(stack: Stack, wanted: Service) -> None:
    """Wait until a scheduler holds the executor."""
    async with asyncio.timeout(TAKEOVER_SECONDS):
        while not await stack.held_by(wanted):
            await asyncio.sleep(0.2)


def claims(log: Path) -> list[tuple[int, str]]:
    """Epoch and scheduler of every claim that the executor followed."""
    events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [
        (event["epoch"], event["scheduler_id"])
        for event in events
        if event["event"] == "executor_claimed"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "cut off"])
async def test_a_scheduler_that_comes_back_finds_another_owner(
    make_stack: MakeStack, how: str
) -> None:
    """The first owner is stopped, or cut off from the executor, and another one claims it.

    Then it comes back with plans for an executor that it believes to be its own. All streams
    of both end as undisturbed; the executor followed one stream of plans at a time.
    """
    async with make_stack(
        num_executors=1, has_gateway=False, scheduler_flags=("--orphan-timeout-seconds", "10")
    ) as stack:
        first = await owner_of(stack)
        assert first is not None
        second = next(each for each in stack.schedulers if each is not first)
        link = stack.links[f"{first.name}>executor-0"]
        async with AsyncClient(stack.target, retry=PATIENT) as client:
            entries = await record(client, make_entries(copies=1))
        crowd = Crowd(Ledger(), seed=6)
        clients = [
            asyncio.create_task(use_sdk(crowd, f"c{number}", stack.target, entries))
            for number in range(NUM_CLIENTS)
        ]
        await asyncio.sleep(1.0)
        if how == "stopped":
            first.freeze()
        else:
            link.cut(Way.BOTH)
        await until_owner(stack, second)
        num_before = crowd.ledger.num_streams.total()
        first.resume()
        link.restore()
        await asyncio.sleep(3.0)
        await crowd.rest(100)
        crowd.end()
        await asyncio.gather(*clients)
        assert await until_at_rest(stack, 30) is None
        (executor,) = stack.executors
        followed = claims(executor.logs[0])
        _, bad_lines = read_events([executor.logs[0]])
    assert crowd.ledger.problems == []
    assert crowd.ledger.num_streams.total() > num_before, "nothing ran after the takeover"
    assert {name.partition(".")[0] for _, name in followed} == {first.name, second.name}
    epochs = [epoch for epoch, _ in followed]
    assert epochs == sorted(set(epochs))
    assert bad_lines == []
    assert stack.unasked_ends == []
