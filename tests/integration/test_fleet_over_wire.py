"""Several executors, and several schedulers, over the wire: death, drain, share, discovery."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from executor_svc.server import ExecutorServer
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.request import FinishReason, Request, SamplingParams
from scheduler_svc.engine import Engine
from scheduler_svc.errors import Unavailable
from scheduler_svc.stream import TokenStream
from tests.integration.executor_rig import config
from tests.integration.test_engine_over_wire import WAIT, FakeEngine, expected, read_all


class SlowEngine(FakeEngine):
    """Takes a moment for a step, so that there is something to disturb; can hang."""

    seconds = 0.005
    hangs = False

    def run(self, plan: Any) -> Any:
        import time

        time.sleep(self.seconds)
        while self.hangs:
            time.sleep(0.01)
        return super().run(plan)


class Rig:
    """Executors at fixed addresses, and engines over all of them."""

    def __init__(self) -> None:
        self.servers: dict[str, ExecutorServer] = {}
        self.fakes: dict[str, SlowEngine] = {}
        self.engines: list[Engine] = []

    async def executor(self, listen: str = "127.0.0.1:0", **limits: Any) -> str:
        """Start one; gives its address."""
        fake = SlowEngine()
        server = ExecutorServer(config(listen=listen, grace_seconds=10.0, **limits), lambda: fake)
        await server.start()
        await server.wait_ready()
        self.servers[server.address] = server
        self.fakes[server.address] = fake
        return server.address

    async def kill(self, address: str) -> None:
        """End one without a word to anybody."""
        server = self.servers.pop(address)
        await server._server.stop(None)
        await server.stop()

    async def engine(self, *executors: str, **settings: Any) -> Engine:
        """Start a scheduler's engine."""
        engine = Engine(SchedulerConfig(executors=executors, max_num_seqs=8, **settings), "")
        await engine.start()
        self.engines.append(engine)
        return engine

    async def stop(self) -> None:
        """End everything."""
        for fake in self.fakes.values():
            fake.hangs = False
        for engine in self.engines:
            await engine.stop()
        for server in self.servers.values():
            await server.stop()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    yield made
    await made.stop()


async def until(is_so: Callable[[], object]) -> None:
    """Wait for something that is bound to happen."""
    async with asyncio.timeout(WAIT):
        while not is_so():
            await asyncio.sleep(0.01)


def held(engine: Engine) -> list[str]:
    """Addresses of the executors that an engine has."""
    return [session.address for session in engine.sessions if session.connected]


async def submit(engine: Engine, name: str, prompt: list[int], count: int) -> TokenStream:
    """Submit a greedy request."""
    return await engine.submit(Request(name, prompt, SamplingParams(temperature=0.0), count))


async def crowd(engine: Engine, count: int = 10) -> list[tuple[list[int], TokenStream]]:
    """Submit some requests; gives their prompts and streams."""
    prompts = [[3 + i, 7, 2 * i] for i in range(count)]
    return [(p, await submit(engine, f"r{i}", p, 60)) for i, p in enumerate(prompts)]


async def check(streams: list[tuple[list[int], TokenStream]]) -> None:
    """Read all; each must have exactly the model's tokens."""
    outputs = await asyncio.gather(*(read_all(stream) for _, stream in streams))
    for (prompt, _), output in zip(streams, outputs, strict=True):
        assert output.finish is FinishReason.LENGTH, output.error
        assert output.tokens == expected(prompt, 60)


async def two(rig: Rig, **settings: Any) -> tuple[Engine, str, str]:
    """An engine that has two executors."""
    a, b = await rig.executor(), await rig.executor()
    engine = await rig.engine(a, b, **settings)
    await until(lambda: len(held(engine)) == 2)
    return engine, a, b


def assert_whole(engine: Engine) -> None:
    """No core holds a block or a request."""
    assert engine.num_requests == 0
    for session in engine.sessions:
        if session.core is not None:
            assert not session.core.has_requests
            assert session.core.state.blocks.pool.num_referenced == 0


async def test_work_is_spread(rig: Rig) -> None:
    """Two executors get half of it each."""
    engine, _, _ = await two(rig)
    streams = await crowd(engine)
    loads = [session.load_tokens for session in engine.sessions]
    assert max(loads) - min(loads) <= 63
    await check(streams)
    assert_whole(engine)


async def test_a_cached_prefix_draws_requests(rig: Rig) -> None:
    """They go where their prompt is known, while that executor is not much busier."""
    engine, _, _ = await two(rig)
    prompt = list(range(2, 50))
    await read_all(await submit(engine, "first", prompt, 2))
    (home,) = [s for s in engine.sessions if s.core and s.core.state.counters.num_steps]
    for index in range(3):
        await read_all(await submit(engine, f"again{index}", [*prompt, 60 + index], 2))
    assert home.core is not None and home.core.state.counters.num_finished == 4


async def test_streams_move_when_an_executor_dies(rig: Rig) -> None:
    """And go on, exactly, on the other one; its return is welcome."""
    engine, a, b = await two(rig)
    streams = await crowd(engine)
    await asyncio.sleep(0.1)
    await rig.kill(a)
    await check(streams)
    assert held(engine) == [b]
    await rig.executor(a)
    await until(lambda: len(held(engine)) == 2)
    await check(await crowd(engine))
    assert_whole(engine)


async def test_streams_wait_when_the_only_executor_dies(rig: Rig) -> None:
    """Until it is back, or another one is."""
    address, spare = await rig.executor(), await rig.executor()
    await rig.kill(spare)
    engine = await rig.engine(address, spare)
    await until(lambda: held(engine))
    streams = await crowd(engine)
    await asyncio.sleep(0.1)
    await rig.kill(address)
    await asyncio.sleep(0.3)
    with pytest.raises(Unavailable, match="no executor takes requests"):
        await submit(engine, "late", [1], 1)
    await rig.executor(spare)
    await check(streams)
    assert_whole(engine)


async def test_nobody_waits_for_an_executor_for_ever(rig: Rig) -> None:
    """After a time the client hears that it may resume elsewhere; cancels work meanwhile."""
    address = await rig.executor()
    engine = await rig.engine(address, orphan_timeout_seconds=1.0)
    await until(lambda: held(engine))
    streams = await crowd(engine, 3)
    await streams[0][1].receive()
    await rig.kill(address)
    streams[1][1].cancel()
    with pytest.raises(Unavailable, match="resume elsewhere"):
        await read_all(streams[0][1])
    assert engine.num_requests == 0


async def test_requests_are_handed_over_where_another_scheduler_works(rig: Rig) -> None:
    """Long before they would be given up: their clients resume there."""
    addresses = [await rig.executor() for _ in range(2)]
    first = await rig.engine(*addresses, scheduler_id="first", handover_seconds=0.5)
    second = await rig.engine(*addresses, scheduler_id="second")
    await until(lambda: len(held(first)) == len(held(second)) == 1)
    stream = await submit(first, "orphan", [5, 6], 200)
    tokens = [token for output in await stream.receive() for token in output.tokens]
    await rig.kill(held(first)[0])
    with pytest.raises(Unavailable, match="resume elsewhere"):
        while True:
            tokens += [token for output in await stream.receive() for token in output.tokens]
    request = Request(
        "again", [5, 6], SamplingParams(temperature=0.0), 200, resumed={0: tuple(tokens)}
    )
    rest = (await read_all(await second.submit(request))).tokens
    assert [*tokens, *rest] == expected([5, 6], 200)


async def test_a_deadline_passes_without_an_executor(rig: Rig) -> None:
    """It ends the request all the same."""
    import time

    address = await rig.executor()
    engine = await rig.engine(address)
    await until(lambda: held(engine))
    deadline = time.monotonic() + 1.0
    request = Request("late", [4, 5], SamplingParams(temperature=0.0), 200, deadline=deadline)
    stream = await engine.submit(request)
    await stream.receive()
    await rig.kill(address)
    assert (await read_all(stream)).finish is FinishReason.CANCELLED


async def test_a_hung_executor_is_left(rig: Rig) -> None:
    """Its steps stop coming: the requests go on elsewhere, and it is used again later."""
    engine, a, _ = await two(rig, min_step_timeout_seconds=0.3)
    await check(await crowd(engine))  # learns how long steps take
    streams = await crowd(engine)
    await asyncio.sleep(0.05)
    rig.fakes[a].hangs = True
    await check(streams)
    rig.fakes[a].hangs = False
    await until(lambda: len(held(engine)) == 2)
    await check(await crowd(engine))
    assert_whole(engine)


async def test_a_draining_executor_loses_its_requests_to_the_other(rig: Rig) -> None:
    """At once, so that it ends long before its grace is over."""
    engine, a, b = await two(rig)
    streams = await crowd(engine)
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await rig.servers[a].drain()
    assert held(engine) == [b]
    await rig.kill(a)
    await check(streams)
    assert_whole(engine)


async def test_the_last_executor_drains_when_its_streams_are_done(rig: Rig) -> None:
    """What runs finishes there, or moves as soon as another one comes; nothing new is taken."""
    address, spare = await rig.executor(), await rig.executor()
    await rig.kill(spare)
    engine = await rig.engine(address, spare)
    await until(lambda: held(engine))
    streams = await crowd(engine)
    draining = asyncio.create_task(rig.servers[address].drain())
    await until(lambda: engine.sessions[0].is_draining)
    with pytest.raises(Unavailable, match="is shutting down"):
        await submit(engine, "late", [1], 1)
    await check(streams)
    await draining
    assert_whole(engine)


async def test_schedulers_share_executors(rig: Rig) -> None:
    """A second one gets half of them while requests run, and all of them once it is alone."""
    addresses = [await rig.executor() for _ in range(4)]
    first = await rig.engine(*addresses, scheduler_id="first")
    await until(lambda: len(held(first)) == 4)
    streams = await crowd(first, 12)
    second = await rig.engine(*addresses, scheduler_id="second")
    await until(lambda: len(held(first)) == len(held(second)) == 2)
    assert Counter([*held(first), *held(second)]) == Counter(addresses)
    await check(streams)
    await check(await crowd(second))
    assert_whole(first)
    await first.stop()
    await until(lambda: len(held(second)) == 4)
    await check(await crowd(second))


async def test_a_scheduler_without_an_executor_stands_by(rig: Rig) -> None:
    """The one that has the only executor keeps it."""
    address = await rig.executor()
    first = await rig.engine(address, scheduler_id="b")
    await until(lambda: held(first))
    second = await rig.engine(address, scheduler_id="a")
    await asyncio.sleep(2.0)
    assert held(first) and not held(second) and not second.is_healthy
    await first.stop()
    await until(lambda: held(second))


async def test_a_scheduler_that_leaves_gives_idle_executors_back(rig: Rig) -> None:
    """While its last streams run, a replica has the others already."""
    addresses = [await rig.executor() for _ in range(2)]
    first = await rig.engine(*addresses, scheduler_id="first")
    await until(lambda: len(held(first)) == 2)
    prompt = [5, 6]
    stream = await submit(first, "long", prompt, 200)
    leaving = asyncio.create_task(first.drain(WAIT))
    second = await rig.engine(*addresses, scheduler_id="second")
    await until(lambda: len(held(second)) == 1)
    assert len(held(first)) == 1
    assert (await read_all(stream)).tokens == expected(prompt, 200)
    await leaving
    await until(lambda: len(held(second)) == 2)


async def test_executors_are_found_by_name(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses that join are used, those that leave are forgotten."""
    from scheduler_svc import fleet
    from scheduler_svc.discovery import Discovery

    monkeypatch.setattr(fleet, "_RESOLVE_SECONDS", 0.1)
    found: list[tuple[str, int]] = []

    async def look_up(self: Discovery, name: str) -> list[Any]:
        from scheduler_svc.discovery import Place

        return [Place(f"{host}:{port}") for host, port in found]

    monkeypatch.setattr(Discovery, "_resolve", look_up)
    a, b = await rig.executor(), await rig.executor()
    engine = await rig.engine("dns:///executors:1")
    with contextlib.suppress(Unavailable):
        await submit(engine, "none", [1], 1)
    found.append((a.rpartition(":")[0], int(a.rpartition(":")[2])))
    await until(lambda: held(engine) == [a])
    streams = await crowd(engine)
    found.append((b.rpartition(":")[0], int(b.rpartition(":")[2])))
    await until(lambda: set(held(engine)) == {a, b})
    del found[0]
    await rig.kill(a)
    await check(streams)
    await until(lambda: [s.address for s in engine.sessions] == [b])
    await check(await crowd(engine))


async def test_a_request_that_kills_executors_fails_alone(rig: Rig) -> None:
    """However many there are; the others' streams go on."""
    engine, *addresses = await two(rig)
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
                fake = rig.fakes[address]
                fake.fault = poison(address)
                if rig.servers[address]._device.died.done():
                    await rig.kill(address)
                    await rig.executor(address)
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
