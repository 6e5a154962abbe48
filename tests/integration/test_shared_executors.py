"""Whose executor is whose: shares of schedulers, addresses that come and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest

from scheduler_svc.core.request import Request, SamplingParams
from scheduler_svc.discovery import Discovery, Place
from scheduler_svc.errors import Unavailable
from tests.integration.fleet_rig import FleetRig, assert_whole, check, crowd, held, submit, until
from tests.integration.test_engine_over_wire import WAIT, expected, read_all


async def test_requests_are_handed_over_where_another_scheduler_works(fleet: FleetRig) -> None:
    """Long before they would be given up: their clients resume there."""
    addresses = [await fleet.executor() for _ in range(2)]
    first = await fleet.engine(*addresses, scheduler_id="first", handover_seconds=0.5)
    second = await fleet.engine(*addresses, scheduler_id="second")
    await until(lambda: len(held(first)) == len(held(second)) == 1)
    stream = await submit(first, "orphan", [5, 6], 200)
    tokens = [token for output in await stream.receive() for token in output.tokens]
    await fleet.kill(held(first)[0])
    with pytest.raises(Unavailable, match="resume elsewhere"):
        while True:
            tokens += [token for output in await stream.receive() for token in output.tokens]
    request = Request(
        "again", [5, 6], SamplingParams(temperature=0.0), 200, resumed={0: tuple(tokens)}
    )
    rest = (await read_all(await second.submit(request))).tokens
    assert [*tokens, *rest] == expected([5, 6], 200)


async def test_one_executor_at_two_addresses_is_one(fleet: FleetRig) -> None:
    """It is not taken from itself, and counts once."""
    address = await fleet.executor()
    other = f"localhost:{address.rpartition(':')[2]}"
    engine = await fleet.engine(address, other)
    await until(lambda: held(engine))
    streams = await crowd(engine)
    await asyncio.sleep(2.5)
    assert len(held(engine)) == 1
    assert max(session.epoch for session in engine.sessions) == 1
    await check(streams)


async def test_a_scheduler_of_another_model_takes_no_share(fleet: FleetRig) -> None:
    """It can claim nothing, so nothing is given back for it."""
    addresses = [await fleet.executor(fingerprint="aa") for _ in range(2)]
    first = await fleet.engine(*addresses, scheduler_id="first", fingerprint="aa")
    await until(lambda: len(held(first)) == 2)
    other = await fleet.engine(*addresses, scheduler_id="other", fingerprint="bb")
    await asyncio.sleep(4.0)
    assert len(held(first)) == 2 and not held(other)
    assert "aa" in other.sessions[0].last_error and "bb" in other.sessions[0].last_error


async def test_a_leaving_scheduler_gets_its_executor_back(fleet: FleetRig) -> None:
    """Its last streams need it, though it claims no other any more."""
    address = await fleet.executor()
    engine = await fleet.engine(address)
    await until(lambda: held(engine))
    stream = await submit(engine, "long", [5, 6], 100)
    await stream.receive()
    stream = await submit(engine, "last", [7, 8], 150)
    leaving = asyncio.create_task(engine.drain(WAIT))
    await asyncio.sleep(0.05)
    await fleet.kill(address)
    await fleet.executor(address)
    assert (await read_all(stream)).tokens == expected([7, 8], 150)
    assert await leaving == 0


async def test_schedulers_share_executors(fleet: FleetRig) -> None:
    """A second one gets half of them while requests run, and all of them once it is alone."""
    addresses = [await fleet.executor() for _ in range(4)]
    first = await fleet.engine(*addresses, scheduler_id="first")
    await until(lambda: len(held(first)) == 4)
    streams = await crowd(first, 12)
    second = await fleet.engine(*addresses, scheduler_id="second")
    await until(lambda: len(held(first)) == len(held(second)) == 2)
    assert Counter([*held(first), *held(second)]) == Counter(addresses)
    await check(streams)
    await check(await crowd(second))
    assert_whole(first)
    await first.stop()
    await until(lambda: len(held(second)) == 4)
    await check(await crowd(second))


async def test_a_scheduler_without_an_executor_stands_by(fleet: FleetRig) -> None:
    """The one that has the only executor keeps it."""
    address = await fleet.executor()
    first = await fleet.engine(address, scheduler_id="b")
    await until(lambda: held(first))
    second = await fleet.engine(address, scheduler_id="a")
    await asyncio.sleep(2.0)
    assert held(first) and not held(second) and not second.is_healthy
    await first.stop()
    await until(lambda: held(second))


async def test_a_scheduler_that_leaves_gives_idle_executors_back(fleet: FleetRig) -> None:
    """While its last streams run, a replica has the others already."""
    addresses = [await fleet.executor() for _ in range(2)]
    first = await fleet.engine(*addresses, scheduler_id="first")
    await until(lambda: len(held(first)) == 2)
    prompt = [5, 6]
    stream = await submit(first, "long", prompt, 200)
    leaving = asyncio.create_task(first.drain(WAIT))
    second = await fleet.engine(*addresses, scheduler_id="second")
    await until(lambda: len(held(second)) == 1)
    assert len(held(first)) == 1
    assert (await read_all(stream)).tokens == expected(prompt, 200)
    await leaving
    await until(lambda: len(held(second)) == 2)


async def test_executors_are_found_by_name(
    fleet: FleetRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses that join are used, those that leave are forgotten."""
    monkeypatch.setattr("scheduler_svc.fleet._RESOLVE_SECONDS", 0.1)
    found: list[tuple[str, int]] = []

    async def look_up(self: Discovery, name: str) -> list[Any]:
        return [Place(f"{host}:{port}") for host, port in found]

    monkeypatch.setattr(Discovery, "_resolve", look_up)
    a, b = await fleet.executor(), await fleet.executor()
    engine = await fleet.engine("dns:///executors:1")
    with contextlib.suppress(Unavailable):
        await submit(engine, "none", [1], 1)
    found.append((a.rpartition(":")[0], int(a.rpartition(":")[2])))
    await until(lambda: held(engine) == [a])
    streams = await crowd(engine)
    found.append((b.rpartition(":")[0], int(b.rpartition(":")[2])))
    await until(lambda: set(held(engine)) == {a, b})
    del found[0]
    await fleet.kill(a)
    await check(streams)
    await until(lambda: [s.address for s in engine.sessions] == [b])
    await check(await crowd(engine))
