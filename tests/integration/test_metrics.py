"""Metrics over a real wire: executors that die, schedulers that quarrel, loops that hang."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from octavo.metrics import Metric, Reading
from octavo.v1 import executor_pb2 as pb

from executor_svc import metrics as executor_metrics
from executor_svc.errors import StartupError
from executor_svc.server import ExecutorServer
from scheduler_svc.observation import definitions as d
from scheduler_svc.observation.metrics import Metrics
from tests.integration.executor_rig import Running, config
from tests.integration.fleet_rig import FleetRig, check, crowd, held, two, until
from tests.integration.test_engine_over_wire import WAIT, FakeEngine

NUM_TOKENS = 60  # of each request of a crowd


def _sum(reading: Reading, metric: Metric, **labels: str) -> float:
    """Of all series that have these labels."""
    return sum(
        value
        for found, value in reading.numbers(metric).items()
        if labels.items() <= dict(zip(metric.labels, found, strict=True)).items()
    )


async def test_totals_survive_the_death_of_an_executor(fleet: FleetRig) -> None:
    """Every request has one first token and one end, and every step is told, wherever it ran."""
    engine, first, second = await two(fleet)
    metrics = engine.observer.meter = Metrics(engine)
    streams = await crowd(engine)
    await until(lambda: all(session.load_tokens for session in engine.sessions))
    await streams[0][1].receive()
    await fleet.kill(first)
    await check([(prompt, stream) for prompt, stream in streams[1:]])
    await until(lambda: engine.num_requests == 0)
    reading = await metrics.read()
    assert _sum(reading, d.GENERATED_TOKENS) == 10 * NUM_TOKENS
    assert _sum(reading, d.CHOICES, reason="length") == _sum(reading, d.CHOICES) == 10
    assert _sum(reading, d.ENDED_REQUESTS) == 10
    assert _sum(reading, d.ADOPTED_REQUESTS, executor=second) > 0
    assert reading.histograms(d.TIME_TO_FIRST_TOKEN)[()].count == 10
    assert reading.histograms(d.INTER_TOKEN)[()].count == 10 * (NUM_TOKENS - 1)
    steps = reading.histograms(d.STEP_SECONDS)[()].count
    assert steps == _sum(reading, d.EXECUTED_STEPS) <= _sum(reading, d.STEPS)
    assert _sum(reading, d.EXECUTOR_CONNECTED, executor=first) == 0
    assert _sum(reading, d.EXECUTOR_CONNECTED, executor=second) == 1
    assert _sum(reading, d.LIVE_REQUESTS) == _sum(reading, d.LOAD_TOKENS) == 0
    assert (first, "free") not in reading.numbers(d.POOL_BLOCKS), "its blocks are nobody's"


async def test_executors_and_scheduler_agree_on_steps_and_tokens(fleet: FleetRig) -> None:
    """What one sent is what the other answered."""
    engine, *addresses = await two(fleet)
    metrics = engine.observer.meter = Metrics(engine)
    await check(await crowd(engine))
    await until(lambda: not any(s.core and s.core.state.in_flight for s in engine.sessions))
    reading = await metrics.read()
    for address in addresses:
        told = await fleet.servers[address]._servicer.metrics.read()
        steps = _sum(reading, d.EXECUTED_STEPS, executor=address)
        assert _sum(told, executor_metrics.STEPS) == steps > 0
        tokens = _sum(reading, d.GENERATED_TOKENS, executor=address)
        discarded = _sum(reading, d.DISCARDED_TOKENS, executor=address)
        assert _sum(told, executor_metrics.SAMPLED_TOKENS) == tokens + discarded
        assert _sum(told, executor_metrics.OWNED) == 1


async def test_claims_are_told_by_what_became_of_them(running: Running) -> None:
    """Granted, refused, taken over, given back."""
    await (await running.claim(2)).read()
    stale = await running.claim(1)
    assert (await stale.refusal())[1] == "STALE_EPOCH"
    owner = await running.claim(3)
    await owner.read()
    await owner.step()
    await owner.send(claim=pb.Claim())
    assert (await owner.refusal())[1] == "OUT_OF_ORDER"
    last = await running.claim(4)
    await last.read()
    await last.call.done_writing()
    metrics = running.server._servicer.metrics

    async def ended() -> dict[str, float]:
        reading = await metrics.read()
        return {k[0]: n for k, n in reading.numbers(executor_metrics.ENDED_STREAMS).items() if n}

    async with asyncio.timeout(WAIT):
        while (await ended()).get("LEFT") != 1:
            await asyncio.sleep(0.01)
    assert await ended() == {"STALE_EPOCH": 1, "OUT_OF_ORDER": 1, "LEFT": 1}
    reading = await metrics.read()
    assert _sum(reading, executor_metrics.CLAIMS) == 3
    assert _sum(reading, executor_metrics.REFUSED_CLAIMS) == 1
    assert _sum(reading, executor_metrics.STEPS) == 1
    assert _sum(reading, executor_metrics.EPOCH) == 4


async def test_metrics_are_there_while_the_model_loads() -> None:
    """They tell that it is not there yet."""
    fake = FakeEngine()

    def load_slowly() -> FakeEngine:
        time.sleep(0.5)
        return fake

    server = ExecutorServer(config(metrics_listen="127.0.0.1:0"), load_slowly)
    await server.start()
    assert server._outlets is not None
    url = f"http://127.0.0.1:{server._outlets.port}/metrics"
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=WAIT) as http:
            text = (await http.get(url)).text
            assert "\noctavo_executor_ready 0.0\n" in text
            await server.wait_ready()
            text = (await http.get(url)).text
            assert "\noctavo_executor_ready 1.0\n" in text
            assert '\noctavo_executor_pool_blocks{pool="device"} 40.0\n' in text
    finally:
        await server.stop()


async def test_a_taken_port_of_metrics_ends_the_start(fleet: FleetRig) -> None:
    """Before anything else listens."""
    address = await fleet.executor()
    server = ExecutorServer(config(metrics_listen=address), FakeEngine)
    with pytest.raises(StartupError, match="give --metrics-listen another one"):
        await server.start()
    await server.stop()


async def test_a_scrape_of_many_executors_lets_steps_go_on(fleet: FleetRig) -> None:
    """The loop is held for one executor at a time."""
    engine, *_ = await two(fleet)
    metrics = engine.observer.meter = Metrics(engine)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await asyncio.sleep(0)
    before = turns
    await metrics.read()
    assert turns - before >= len(held(engine)) == 2
    counting.cancel()
