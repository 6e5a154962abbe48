"""Executors that can be killed, hung and spoilt, and schedulers' engines over all of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from executor_svc.plan import Outcome, Plan
from executor_svc.server import ExecutorServer
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.request import FinishReason, Request, SamplingParams
from scheduler_svc.engine import Engine
from scheduler_svc.stream import TokenStream
from tests.integration.executor_rig import config
from tests.integration.test_engine_over_wire import WAIT, FakeEngine, expected, read_all


class SlowEngine(FakeEngine):
    """Takes a moment for a step, so that there is something to disturb; can hang."""

    seconds = 0.005
    hangs = False
    spoil: Callable[[Outcome], Outcome] | None = None

    def run(self, plan: Plan) -> Outcome:
        """Carry out one step, late; what it answers may be spoilt once."""
        time.sleep(self.seconds)
        while self.hangs:
            time.sleep(0.01)
        outcome = super().run(plan)
        if self.spoil is not None and outcome.tokens:
            spoil, self.spoil = self.spoil, None
            outcome = spoil(outcome)
        return outcome


class FleetRig:
    """Executors at fixed addresses, and engines over all of them."""

    def __init__(self) -> None:
        self.servers: dict[str, ExecutorServer] = {}
        self.fakes: dict[str, SlowEngine] = {}
        self.engines: list[Engine] = []

    async def executor(
        self, listen: str = "127.0.0.1:0", *, fingerprint: str = "", **limits: Any
    ) -> str:
        """Start one; gives its address."""
        fake = SlowEngine()
        fake.description = replace(fake.description, fingerprint=fingerprint)
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

    async def engine(self, *executors: str, fingerprint: str = "", **settings: Any) -> Engine:
        """Start a scheduler's engine."""
        config = SchedulerConfig(executors=executors, max_num_seqs=8, **settings)
        engine = Engine(config, fingerprint)
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


async def two(fleet: FleetRig, **settings: Any) -> tuple[Engine, str, str]:
    """An engine that has two executors."""
    a, b = await fleet.executor(), await fleet.executor()
    engine = await fleet.engine(a, b, **settings)
    await until(lambda: len(held(engine)) == 2)
    return engine, a, b


def assert_whole(engine: Engine) -> None:
    """No core holds a block or a request."""
    assert engine.num_requests == 0
    for session in engine.sessions:
        if session.core is not None:
            assert not session.core.has_requests
            assert session.core.state.blocks.pool.num_referenced == 0
