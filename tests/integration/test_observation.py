"""What is recorded of requests and steps over a real wire, and what is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from octavo.v1 import admin_pb2, admin_pb2_grpc

from scheduler_svc.api import admin
from scheduler_svc.core.request import BeamParams, Request, SamplingParams
from scheduler_svc.security.gate import Gate
from tests.integration.test_engine_over_wire import Rig, expected, read_all, rig

__all__ = ["rig"]  # a fixture
Kind = admin_pb2.RequestEvent.Kind


@pytest.fixture
async def stub(rig: Rig) -> AsyncIterator[admin_pb2_grpc.AdminServiceAsyncStub]:
    """The admin service over the rig's engine."""
    server = grpc.aio.server()
    admin.add_to_server(admin.AdminServicer(rig.engine, "here", Gate()), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[misc]
    await server.stop(None)


def kinds(story: admin_pb2.ExplainResponse) -> list[str]:
    return [Kind.Name(event.kind).removeprefix("KIND_") for event in story.events]


async def test_a_request_has_its_story(
    rig: Rig, stub: admin_pb2_grpc.AdminServiceAsyncStub
) -> None:
    stream = await rig.submit("one", [5, 6, 7], 9)
    assert (await read_all(stream)).tokens == expected([5, 6, 7], 9)
    story = await stub.Explain(admin_pb2.ExplainRequest(request_id="one"))
    assert kinds(story) == ["QUEUED", "ADMITTED", "FIRST_TOKEN", "FINISHED"]
    times = [event.time_unix_ns for event in story.events]
    assert times == sorted(times)
    assert (story.num_prompt_tokens, story.num_generated_tokens) == (3, 9)
    assert story.events[-1].detail == "length"
    address = rig.engine.sessions[0].address
    assert {event.executor for event in story.events} == {address}


async def test_who_waits_is_told_for_what_and_who_lost_out_to_whom(
    rig: Rig, stub: admin_pb2_grpc.AdminServiceAsyncStub
) -> None:
    """More sequences than the pool of 40 blocks of 8 holds at their longest."""
    streams = [await rig.submit(f"r{i}", [3 + i] * 60, 60) for i in range(6)]
    await asyncio.gather(*map(read_all, streams))
    stories = [await stub.Explain(admin_pb2.ExplainRequest(request_id=f"r{i}")) for i in range(6)]
    told = [kind for story in stories for kind in kinds(story)]
    core = rig.engine.sessions[0].core
    assert core is not None
    assert told.count("PREEMPTED_RECOMPUTE") == core.state.counters.num_recompute_preemptions > 0
    assert told.count("RESUMED") == told.count("PREEMPTED_RECOMPUTE")
    blocked = [e for story in stories for e in story.events if e.kind == Kind.KIND_BLOCKED]
    assert blocked and all(event.detail for event in blocked)
    causes = {
        event.other_request_id
        for story in stories
        for event in story.events
        if event.kind == Kind.KIND_PREEMPTED_RECOMPUTE
    }
    assert causes <= {"", *(f"r{i}" for i in range(6))}


async def test_a_live_request_counts_its_tokens(
    rig: Rig, stub: admin_pb2_grpc.AdminServiceAsyncStub
) -> None:
    stream = await rig.submit("long", [5], 200)
    await stream.receive()
    story = await stub.Explain(admin_pb2.ExplainRequest(request_id="long"))
    assert "FINISHED" not in kinds(story)
    assert 0 < story.num_generated_tokens < 200
    stream.cancel()
    story = await stub.Explain(admin_pb2.ExplainRequest(request_id="long"))
    assert story.events[-1].detail == "cancelled"


async def test_a_search_that_is_cut_off_has_its_choices_ends(
    rig: Rig, stub: admin_pb2_grpc.AdminServiceAsyncStub
) -> None:
    """Two, however many beams were alive."""
    request = Request(
        "search",
        [5, 6],
        SamplingParams(temperature=0.0),
        30,
        n=2,
        best_of=4,
        beam=BeamParams(4),
        arrival=0.0,
    )
    stream = await rig.engine.submit(request)
    stream.cancel()
    story = await stub.Explain(admin_pb2.ExplainRequest(request_id="search"))
    assert kinds(story).count("FINISHED") == 2


async def test_an_unknown_request_is_not_found(
    rig: Rig, stub: admin_pb2_grpc.AdminServiceAsyncStub
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Explain(admin_pb2.ExplainRequest(request_id="who"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'who'" in (caught.value.details() or "")


async def test_every_step_is_told_once_to_each_who_watches(
    rig: Rig, stub: admin_pb2_grpc.AdminServiceAsyncStub
) -> None:
    def steps(snapshot: admin_pb2.Snapshot) -> list[int]:
        return [sample.step_id for sample in snapshot.executors[0].steps]

    watching = stub.Watch(admin_pb2.WatchRequest(interval_ms=20))
    seen: list[int] = steps((await watching.read()).snapshot)  # type: ignore[union-attr]
    assert seen == []
    stream = await rig.submit("any", [5] * 20, 30)
    await read_all(stream)
    single = (await stub.Snapshot(admin_pb2.SnapshotRequest())).snapshot
    async with asyncio.timeout(20):
        while len(seen) < len(steps(single)):
            seen += steps((await watching.read()).snapshot)  # type: ignore[union-attr]
    watching.cancel()
    assert seen == steps(single) == list(range(seen[0], seen[0] + len(seen)))
    samples = list(single.executors[0].steps)
    assert sum(sample.num_chunk_tokens for sample in samples) == 20
    assert sum(sample.num_sampled for sample in samples) >= 30
    assert all(sample.plan_bytes and sample.plan_ns and sample.wire_ns for sample in samples)
    latency = single.latency
    assert (latency.num_first_tokens, latency.num_later_tokens) == (1, 29)
    assert 0 < latency.itl_p50_seconds <= latency.itl_p99_seconds


async def test_only_the_latest_steps_are_kept(
    rig: Rig, stub: admin_pb2_grpc.AdminServiceAsyncStub
) -> None:
    for number in range(2):
        await read_all(await rig.submit(f"r{number}", [5, number + 3], 190))
    single = (await stub.Snapshot(admin_pb2.SnapshotRequest())).snapshot
    kept = single.executors[0].steps
    assert len(kept) == 256 and kept[-1].step_id > 256
