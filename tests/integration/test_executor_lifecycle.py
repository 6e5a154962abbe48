"""The life of an executor's service: loading, hanging, draining, dying."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc

from executor_svc.errors import DeviceLost, StartupError
from executor_svc.executor import Executor
from executor_svc.plan import Description, Outcome, Plan, RowDigest
from executor_svc.server import ExecutorServer, serve
from tests.integration.executor_rig import WAIT, Running, Stream, config, refusal, row_start
from tests.support.in_turn import InTurn


class Gated(InTurn):
    """An engine whose steps wait at a gate, or end the thread."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.gate = threading.Event()
        self.error: BaseException | None = None
        self.rows = 0

    @property
    def num_rows(self) -> int:
        return self.rows

    def reset(self) -> None:
        self.rows = 0

    def run(self, plan: Plan) -> Outcome:
        self.rows += len(plan.starts) - len(plan.finish_rows)
        assert self.gate.wait(WAIT)
        if self.error is not None:
            raise self.error
        return Outcome(epoch=plan.epoch, step_id=plan.step_id)

    def audit(self) -> list[RowDigest]:
        return []


@pytest.fixture
def gated(executor: Executor) -> Gated:
    return Gated(executor.description)


async def test_health_follows_a_hung_step(start: Callable[..., Any], gated: Gated) -> None:
    """NOT_SERVING while a step is past its deadline, SERVING again when it ends."""
    running = await start(lambda: gated, step_deadline_seconds=0.3)
    stream = await running.claim(1)
    await stream.read()
    assert await running.health() == "SERVING"
    await stream.send()
    await running.health_becomes("NOT_SERVING")
    gated.gate.set()
    assert (await stream.read()).step_id == 1
    await running.health_becomes("SERVING")


async def test_a_takeover_with_plans_pending_is_no_error(
    start: Callable[..., Any], gated: Gated, caplog: pytest.LogCaptureFixture
) -> None:
    """Plans that nobody waits for any more end without a word in the log."""
    running = await start(lambda: gated)
    old = await running.claim(1)
    await old.read()
    for _ in range(6):
        await old.send()
    async with asyncio.timeout(WAIT):
        while running.server._device.busy_seconds() == 0:  # a thread's, so there is no event
            await asyncio.sleep(0.01)
    new = await running.claim(2)
    assert (await old.refusal())[1] == "STALE_EPOCH"
    gated.gate.set()
    await new.read()
    gc.collect()
    await asyncio.sleep(0)
    assert not [record for record in caplog.records if "never retrieved" in record.message]


async def test_before_the_model_is_loaded(start: Callable[..., Any], executor: Executor) -> None:
    """A server that still loads answers: not serving, and UNAVAILABLE to all else."""
    gate = threading.Event()

    def load() -> Gated:
        assert gate.wait(WAIT)
        executor.reset()
        return executor

    running = await start(load, ready=False)
    assert await running.health() == "NOT_SERVING"
    for call in (
        running.stub.Describe(pb.DescribeRequest()),
        running.stub.Audit(pb.AuditRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert refusal(caught.value)[:2] == (grpc.StatusCode.UNAVAILABLE, "NOT_READY")
    assert (await (await running.claim(1)).refusal())[1] == "NOT_READY"
    gate.set()
    await running.server.wait_ready()
    assert await running.health() == "SERVING"
    assert (await (await running.claim(1)).read()).HasField("description")


async def test_draining_waits_for_the_rows(start: Callable[..., Any], gated: Gated) -> None:
    """While draining the owner may finish its rows, no one else may claim, then it ends."""
    gated.gate.set()
    running = await start(lambda: gated, grace_seconds=WAIT)
    stream = await running.claim(1)
    await stream.read()
    await stream.step(starts=[row_start()])
    draining = asyncio.create_task(running.server.drain())
    await running.health_becomes("NOT_SERVING")
    code, reason, _ = await (await running.claim(2)).refusal()
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert (await stream.read()).draining
    assert (await stream.step()).step_id == 2
    assert not draining.done()
    await stream.step(finish_rows=[0])
    assert (await stream.refusal())[1] == "DRAINING"
    await asyncio.wait_for(draining, WAIT)


async def test_the_grace_ends(start: Callable[..., Any], gated: Gated) -> None:
    """An owner that keeps its rows is cut off when the grace is over."""
    gated.gate.set()
    running = await start(lambda: gated, grace_seconds=0)
    stream = await running.claim(1)
    await stream.read()
    await stream.step(starts=[row_start()])
    await asyncio.wait_for(running.server.drain(), WAIT)
    assert (await stream.refusal())[1] == "DRAINING"


async def test_a_dead_device_ends_the_service(gated: Gated) -> None:
    """If the device thread dies the stream fails and the process's status is not 0."""
    gated.gate.set()
    gated.error = DeviceLost("fell off the bus")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = asyncio.create_task(serve(config(listen=address), lambda: gated))
    async with grpc.aio.insecure_channel(address) as channel:
        health_stub = health_pb2_grpc.HealthStub(channel)
        watch = health_stub.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
        stream = Stream(executor_pb2_grpc.ExecutorServiceStub(channel), 1)
        await stream.call.write(pb.StepPlan(epoch=1, claim=pb.Claim(scheduler_id="s")))
        await stream.read()
        await stream.send()
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()
    assert await asyncio.wait_for(service, WAIT) == 1


async def test_a_busy_port_is_a_startup_error(running: Running, gated: Gated) -> None:
    """A second executor on the port is told so in one line, and does not share it."""
    second = ExecutorServer(config(listen=running.server.address), lambda: gated)
    with pytest.raises(StartupError, match="in use"):
        await second.start()
    await second.stop()
