"""Two steps in flight hide the network: the executor holds the next plan before it needs it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from executor_svc.device_thread import DeviceThread
from executor_svc.plan import Outcome, Plan
from executor_svc.server import ExecutorServer
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.request import Request, SamplingParams
from scheduler_svc.engine import Engine
from tests.integration.executor_rig import config
from tests.integration.test_engine_over_wire import WAIT, FakeEngine, expected, read_all
from tests.support.delay_proxy import DelayProxy

STEP_SECONDS = 0.03
DELAY_SECONDS = 0.002
NUM_TOKENS = 40


@dataclass
class SlowEngine(FakeEngine):
    """Takes its time for a step; notes at its end whether the next plan is there."""

    last_submitted: int = 0
    held_next: list[bool] = field(default_factory=list)

    def run(self, plan: Plan) -> Outcome:
        """Carry out one step."""
        time.sleep(STEP_SECONDS)
        outcome = super().run(plan)
        self.held_next.append(self.last_submitted > plan.step_id)
        return outcome


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowEngine:
    """An engine that knows which plans have reached its device thread."""
    engine = SlowEngine()
    submit = DeviceThread.submit

    def note(device: DeviceThread, plan: Plan) -> Future[Outcome]:
        engine.last_submitted = plan.step_id
        return submit(device, plan)

    monkeypatch.setattr(DeviceThread, "submit", note)
    return engine


async def serve_one_request(slow: SlowEngine, max_steps_in_flight: int) -> Engine:
    """Let one request run over a wire with a delay each way; returns the engine, stopped."""
    server = ExecutorServer(config(), lambda: slow)
    await server.start()
    await server.wait_ready()
    async with DelayProxy(server.address, delay_seconds=DELAY_SECONDS) as proxy:
        settings = SchedulerConfig(
            executors=(proxy.address,), max_steps_in_flight=max_steps_in_flight
        )
        engine = Engine(settings, "")
        await engine.start()
        async with asyncio.timeout(WAIT):
            while not engine.is_healthy:
                await asyncio.sleep(0.01)
        request = Request("r", [5, 6, 7], SamplingParams(temperature=0.0), NUM_TOKENS)
        output = await read_all(await engine.submit(request))
        assert output.tokens == expected([5, 6, 7], NUM_TOKENS)
        await engine.stop()
    await server.stop()
    return engine


async def test_with_two_steps_in_flight_the_next_plan_is_there_in_time(slow: SlowEngine) -> None:
    """At the end of nearly every step but the last; a busy machine may spoil a few."""
    await serve_one_request(slow, max_steps_in_flight=2)
    *before_last, last = slow.held_next
    assert len(before_last) == NUM_TOKENS - 1 and not last
    assert sum(before_last) > 0.75 * len(before_last)


async def test_with_one_step_in_flight_the_executor_waits_for_every_plan(slow: SlowEngine) -> None:
    """And its scheduler counts that as idleness: this is what a second step is for."""
    engine = await serve_one_request(slow, max_steps_in_flight=1)
    assert slow.held_next == [False] * NUM_TOKENS
    assert engine.sessions[0].core is not None
    counters = engine.sessions[0].core.state.counters
    # Each wait holds two delays; half of that is asked for, since clocks start late.
    assert counters.executor_idle_ns >= (NUM_TOKENS - 1) * DELAY_SECONDS * 1e9
