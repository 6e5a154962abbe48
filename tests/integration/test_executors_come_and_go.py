"""Executors that die, hang, answer wrongly, drain and come back: requests move and go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from executor_svc.plan import Outcome
from scheduler_svc.core.request import FinishReason, Request, SamplingParams
from scheduler_svc.errors import Unavailable
from tests.integration.fleet_rig import (
    FleetRig,
    assert_whole,
    check,
    crowd,
    held,
    submit,
    two,
    until,
)
from tests.integration.test_engine_over_wire import read_all


async def test_work_is_spread(fleet: FleetRig) -> None:
    """Two executors get half of it each."""
    engine, _, _ = await two(fleet)
    streams = await crowd(engine)
    loads = [session.load_tokens for session in engine.sessions]
    assert max(loads) - min(loads) <= 63
    await check(streams)
    assert_whole(engine)


async def test_a_cached_prefix_draws_requests(fleet: FleetRig) -> None:
    """They go where their prompt is known, while that executor is not much busier."""
    engine, _, _ = await two(fleet)
    prompt = list(range(2, 50))
    await read_all(await submit(engine, "first", prompt, 2))
    (home,) = [s for s in engine.sessions if s.core and s.core.state.counters.num_steps]
    for index in range(3):
        await read_all(await submit(engine, f"again{index}", [*prompt, 60 + index], 2))
    assert home.core is not None and home.core.state.counters.num_finished == 4


async def test_streams_move_when_an_executor_dies(fleet: FleetRig) -> None:
    """And go on, exactly, on the other one; its return is welcome."""
    engine, a, b = await two(fleet)
    streams = await crowd(engine)
    await asyncio.sleep(0.1)
    await fleet.kill(a)
    await check(streams)
    assert held(engine) == [b]
    await fleet.executor(a)
    await until(lambda: len(held(engine)) == 2)
    await check(await crowd(engine))
    assert_whole(engine)


async def test_streams_wait_when_the_only_executor_dies(fleet: FleetRig) -> None:
    """Until it is back, or another one is."""
    address, spare = await fleet.executor(), await fleet.executor()
    await fleet.kill(spare)
    engine = await fleet.engine(address, spare)
    await until(lambda: held(engine))
    streams = await crowd(engine)
    await asyncio.sleep(0.1)
    await fleet.kill(address)
    await asyncio.sleep(0.3)
    with pytest.raises(Unavailable, match="no executor takes requests"):
        await submit(engine, "late", [1], 1)
    await fleet.executor(spare)
    await check(streams)
    assert_whole(engine)


async def test_nobody_waits_for_an_executor_for_ever(fleet: FleetRig) -> None:
    """After a time the client hears that it may resume elsewhere; cancels work meanwhile."""
    address = await fleet.executor()
    engine = await fleet.engine(address, orphan_timeout_seconds=1.0)
    await until(lambda: held(engine))
    streams = await crowd(engine, 3)
    await streams[0][1].receive()
    await fleet.kill(address)
    streams[1][1].cancel()
    with pytest.raises(Unavailable, match="resume elsewhere"):
        await read_all(streams[0][1])
    assert engine.num_requests == 0


async def test_a_deadline_passes_without_an_executor(fleet: FleetRig) -> None:
    """It ends the request all the same."""
    address = await fleet.executor()
    engine = await fleet.engine(address)
    await until(lambda: held(engine))
    deadline = time.monotonic() + 1.0
    request = Request("late", [4, 5], SamplingParams(temperature=0.0), 200, deadline=deadline)
    stream = await engine.submit(request)
    await stream.receive()
    await fleet.kill(address)
    assert (await read_all(stream)).finish is FinishReason.CANCELLED


async def test_a_hung_executor_is_left(fleet: FleetRig) -> None:
    """Its steps stop coming: the requests go on elsewhere, and it is used again later."""
    engine, a, _ = await two(fleet, min_step_timeout_seconds=0.3)
    await check(await crowd(engine))  # learns how long steps take
    streams = await crowd(engine)
    await asyncio.sleep(0.05)
    fleet.fakes[a].hangs = True
    await check(streams)
    fleet.fakes[a].hangs = False
    await until(lambda: len(held(engine)) == 2)
    await check(await crowd(engine))
    assert_whole(engine)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda outcome: replace(outcome, tokens=[*outcome.tokens, 5]),
        lambda outcome: replace(outcome, tokens=outcome.tokens[1:]),
        lambda outcome: replace(outcome, tokens=[1 << 31] * len(outcome.tokens)),
        lambda outcome: replace(outcome, step_id=outcome.step_id + 1),
        lambda outcome: replace(outcome, epoch=outcome.epoch + 1),
    ],
    ids=["a token too many", "one too few", "no such token", "another step", "another epoch"],
)
async def test_a_bad_result_loses_the_executor_not_the_scheduler(
    fleet: FleetRig, spoil: Callable[[Outcome], Outcome]
) -> None:
    """Nothing of it is taken in; the requests are computed anew, elsewhere."""
    engine, a, _ = await two(fleet)
    streams = await crowd(engine)
    await asyncio.sleep(0.05)
    fleet.fakes[a].spoil = spoil
    await check(streams)
    assert fleet.fakes[a].spoil is None and not engine.died.done()
    await until(lambda: len(held(engine)) == 2)
    assert_whole(engine)


async def test_a_draining_executor_loses_its_requests_to_the_other(fleet: FleetRig) -> None:
    """At once, so that it ends long before its grace is over."""
    engine, a, b = await two(fleet)
    streams = await crowd(engine)
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await fleet.servers[a].drain()
    assert held(engine) == [b]
    await fleet.kill(a)
    await check(streams)
    assert_whole(engine)


async def test_the_last_executor_drains_when_its_streams_are_done(fleet: FleetRig) -> None:
    """What runs finishes there, or moves as soon as another one comes; nothing new is taken."""
    address, spare = await fleet.executor(), await fleet.executor()
    await fleet.kill(spare)
    engine = await fleet.engine(address, spare)
    await until(lambda: held(engine))
    streams = await crowd(engine)
    draining = asyncio.create_task(fleet.servers[address].drain())
    await until(lambda: engine.sessions[0].is_draining)
    with pytest.raises(Unavailable, match="is shutting down"):
        await submit(engine, "late", [1], 1)
    await check(streams)
    await draining
    assert_whole(engine)


async def test_a_replacement_takes_over_from_one_that_drains(fleet: FleetRig) -> None:
    """It comes while the old one still runs its streams, as in a rolling update."""
    address, spare = await fleet.executor(), await fleet.executor()
    await fleet.kill(spare)
    engine = await fleet.engine(address, spare)
    await until(lambda: held(engine))
    streams = await crowd(engine)
    draining = asyncio.create_task(fleet.servers[address].drain())
    await until(lambda: engine.sessions[0].is_draining)
    fleet.fakes[address].seconds = 0.2
    await fleet.executor(spare)
    await until(lambda: held(engine) == [spare])
    await draining
    await check(streams)
    assert_whole(engine)


async def test_a_request_that_kills_executors_fails_alone(fleet: FleetRig) -> None:
    """However many there are; the others' streams go on."""
    engine, *addresses = await two(fleet)
    deaths: list[str] = []

    def poison(address: str) -> Callable[[list[list[int]], int], None]:
        def fault(rows: list[list[int]], _: int) -> None:
            if any(row[:3] == [66, 66, 66] for row in rows):
                deaths.append(address)
                raise SystemExit("as a crash of the process")

        return fault

    async def revive() -> None:
        """As an orchestrator does."""
        while True:
            for address in addresses:
                fake = fleet.fakes[address]
                fake.fault = poison(address)
                if fleet.servers[address]._device.died.done():
                    await fleet.kill(address)
                    await fleet.executor(address)
            await asyncio.sleep(0.05)

    reviving = asyncio.create_task(revive())
    streams = await crowd(engine)
    bad = await submit(engine, "poison", [66, 66, 66], 20)
    output = await read_all(bad)
    assert output.finish is FinishReason.ERROR and "executors died" in output.error
    assert 2 <= len(deaths) <= 3
    await check(streams)
    reviving.cancel()
    assert_whole(engine)
