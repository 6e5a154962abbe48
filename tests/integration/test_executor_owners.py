"""Owners that come and go: who is told of whom, and how the executor gets free again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc

from executor_svc import plan_stream
from executor_svc.executor import Executor
from executor_svc.plan import Description, Outcome, Plan, RowDigest
from tests.integration.executor_rig import WAIT, Running, Stream, refusal, row_start
from tests.support.in_turn import InTurn


class Slow(InTurn):
    """An engine that waits at a gate, and draws as many tokens as it is told."""

    def __init__(self, description: Description) -> None:
        self.description = description
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.num_tokens = 0
        self.rows = 0

    @property
    def num_rows(self) -> int:
        return self.rows

    def reset(self) -> None:
        self.rows = 0

    def run(self, plan: Plan) -> Outcome:
        self.rows += len(plan.starts) - len(plan.finish_rows)
        self.entered.set()
        assert self.gate.wait(WAIT)
        return Outcome(epoch=plan.epoch, step_id=plan.step_id, tokens=[7] * self.num_tokens)

    def audit(self) -> list[RowDigest]:
        return []


@pytest.fixture
def slow(executor: Executor) -> Slow:
    return Slow(executor.description)


async def describe(running: Running, name: str = "") -> pb.DescribeResponse:
    return await running.stub.Describe(pb.DescribeRequest(scheduler_id=name))


async def until_free(running: Running) -> pb.DescribeResponse:
    async with asyncio.timeout(WAIT):
        while (described := await describe(running)).owner:  # it is asked, it does not tell
            await asyncio.sleep(0.01)
    return described


@contextlib.asynccontextmanager
async def connection(running: Running) -> AsyncIterator[tuple[grpc.aio.Channel, Any]]:
    """A connection of one scheduler's own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(running.server.address, options=options) as channel:
        yield channel, executor_pb2_grpc.ExecutorServiceStub(channel)


async def claim_over(stub: Any, epoch: int, name: str) -> Stream:
    stream = Stream(stub, epoch)
    await stream.call.write(pb.StepPlan(epoch=epoch, claim=pb.Claim(scheduler_id=name)))
    assert (await stream.read()).HasField("description")
    return stream


async def test_schedulers_are_told_of_each_other(running: Running) -> None:
    """Who asked by name is in the answer, and in the answer to a claim; nobody is not."""
    assert list((await describe(running)).schedulers) == []
    assert list((await describe(running, "b")).schedulers) == ["b"]
    assert list((await describe(running, "a")).schedulers) == ["a", "b"]
    stream = await running.claim(1)
    assert list((await stream.read()).description.schedulers) == ["a", "b", "s1"]
    assert list((await describe(running)).schedulers) == ["a", "b", "s1"]


async def test_a_name_of_any_length_is_not_kept(running: Running) -> None:
    """At most 128 characters, of whatever alphabet."""
    longest = "ü" * 128
    assert list((await describe(running, longest)).schedulers) == [longest]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await describe(running, "x" * 129)
    code, reason, message = refusal(caught.value)
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert "128" in message
    assert list((await describe(running)).schedulers) == [longest]


async def test_an_owner_that_leaves_stays_in_line(running: Running) -> None:
    """It ended its stream by itself, and may want another executor, or this one again."""
    await describe(running, "s1")
    stream = await running.claim(1)
    await stream.read()
    await stream.call.done_writing()
    assert await asyncio.wait_for(stream.call.read(), WAIT) is grpc.aio.EOF
    described = await describe(running)
    assert (described.owner, list(described.schedulers)) == ("", ["s1"])


async def test_an_owner_whose_connection_breaks_is_dropped_at_once(running: Running) -> None:
    """Others need not wait for its name to expire before they count their shares anew."""
    async with connection(running) as (channel, stub):
        await stub.Describe(pb.DescribeRequest(scheduler_id="lost"))
        await describe(running, "other")
        await claim_over(stub, 1, "lost")
        await channel.close()
        described = await until_free(running)
        assert list(described.schedulers) == ["other"]


async def test_an_owner_that_breaks_between_plans_is_dropped_at_once(
    start: Callable[..., Any], slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    """With a step on the device and results still to be written, and without a traceback."""
    running = await start(lambda: slow)
    async with connection(running) as (channel, stub):
        await stub.Describe(pb.DescribeRequest(scheduler_id="lost"))
        stream = await claim_over(stub, 1, "lost")
        slow.gate.clear()
        for _ in range(3):
            await stream.send()
        assert await asyncio.to_thread(slow.entered.wait, WAIT)
        await channel.close()
        described = await until_free(running)
        slow.gate.set()
        assert list(described.schedulers) == []
    assert (await (await running.claim(2)).read()).description.owner == "s2"
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_taken_over_owner_may_be_back_when_its_old_stream_breaks(
    running: Running,
) -> None:
    """What the end of an old connection drops, the new lease of the same name keeps."""
    async with connection(running) as (channel, stub):
        await claim_over(stub, 1, "again")
        new = Stream(running.stub, 2)
        await new.call.write(pb.StepPlan(epoch=2, claim=pb.Claim(scheduler_id="again")))
        await new.read()
        await channel.close()
        assert (await new.step()).step_id == 1
        described = await describe(running)
        assert (described.owner, list(described.schedulers)) == ("again", ["again"])


async def test_a_draining_executor_says_so_at_once(start: Callable[..., Any], slow: Slow) -> None:
    """Once, between results and not behind a long step; the stream is still answered."""
    running = await start(lambda: slow, grace_seconds=WAIT)
    stream = await running.claim(1)
    assert not (await stream.read()).description.draining
    await stream.step(starts=[row_start()])
    slow.gate.clear()
    await stream.send()
    draining = asyncio.create_task(running.server.drain())
    assert await stream.read() == pb.StepResult(epoch=1, draining=True)
    assert (await describe(running)).draining
    slow.gate.set()
    results = [await stream.read(), await stream.step(), await stream.step(finish_rows=[0])]
    assert [(result.step_id, result.draining) for result in results] == [
        (2, False),
        (3, False),
        (4, False),
    ]
    assert (await stream.refusal())[1] == "DRAINING"
    await asyncio.wait_for(draining, WAIT)


async def test_an_owner_without_rows_is_told_before_its_stream_ends(running: Running) -> None:
    """It learns why, also if there is nothing to wait for."""
    stream = await running.claim(1)
    await stream.read()
    draining = asyncio.create_task(running.server.drain())
    assert (await stream.read()).draining
    assert (await stream.refusal())[1] == "DRAINING"
    await asyncio.wait_for(draining, WAIT)


async def test_an_owner_that_leaves_ends_the_drain(start: Callable[..., Any], slow: Slow) -> None:
    """At once, whatever rows it left behind: they are of a lease that is over."""
    running = await start(lambda: slow, grace_seconds=10 * WAIT)
    stream = await running.claim(1)
    await stream.read()
    await stream.step(starts=[row_start()])
    draining = asyncio.create_task(running.server.drain())
    assert (await stream.read()).draining
    await stream.call.done_writing()
    assert await asyncio.wait_for(stream.call.read(), WAIT) is grpc.aio.EOF
    await asyncio.wait_for(draining, WAIT)
    assert slow.num_rows == 1


async def test_an_owner_that_reads_nothing_loses_its_lease(
    start: Callable[..., Any], slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is connected and answers keep-alives, but its results would wait for ever."""
    monkeypatch.setattr(plan_stream, "WRITE_SECONDS", 0.5)
    slow.num_tokens = 2_000_000
    running = await start(lambda: slow)
    async with connection(running) as (_, stub):
        stream = await claim_over(stub, 1, "stalled")
        for _ in range(8):
            await stream.send()
        await until_free(running)
        new = await running.claim(2)
        assert (await new.read()).description.owner == "s2"
        slow.num_tokens = 1
        assert (await new.step()).step_id == 1
        # Once it reads again, what was written comes, and then the reason.
        assert (await stream.refusal())[:2] == (grpc.StatusCode.ABORTED, "READER_STALLED")


_OWNER = """
import sys, grpc
from octavo.v1 import executor_pb2 as pb, executor_pb2_grpc
channel = grpc.insecure_channel(sys.argv[1])
stub = executor_pb2_grpc.ExecutorServiceStub(channel)
stub.Describe(pb.DescribeRequest(scheduler_id="owner"))
def plans():
    yield pb.StepPlan(epoch=1, claim=pb.Claim(scheduler_id="owner"))
    sys.stdin.read()
for result in stub.Run(plans()):
    print("owns", flush=True)
"""


@contextlib.contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-P", "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


async def test_a_killed_owner_is_dropped_at_once(running: Running) -> None:
    """Its connection is reset, and no call of it was cancelled."""
    with process(_OWNER, running.server.address) as owner:
        assert owner.stdout is not None
        assert await asyncio.to_thread(owner.stdout.readline) == "owns\n"
        os.kill(owner.pid, signal.SIGKILL)
        described = await until_free(running)
        assert list(described.schedulers) == []


@pytest.mark.slow
async def test_a_stopped_owner_is_missed(running: Running) -> None:
    """Its machine still answers for it, but no keep-alive: in 15 s the executor is free."""
    with process(_OWNER, running.server.address) as owner:
        assert owner.stdout is not None
        assert await asyncio.to_thread(owner.stdout.readline) == "owns\n"
        assert (await describe(running)).owner == "owner"
        os.kill(owner.pid, signal.SIGSTOP)
        described = await until_free(running)
        assert list(described.schedulers) == []
        assert (await (await running.claim(2)).read()).description.owner == "s2"
