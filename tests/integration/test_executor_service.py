"""The executor's service over real gRPC: claims, fencing, order, errors, health."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc, types_pb2
from transformers import LlamaConfig, LlamaForCausalLM

from executor_svc.config import ExecutorConfig
from executor_svc.device_thread import Engine
from executor_svc.errors import DeviceLost, StartupError
from executor_svc.executor import Executor
from executor_svc.plan import Description, Outcome, Plan, RowDigest
from executor_svc.server import SERVICE, ExecutorServer, serve

WAIT = 30.0
PROMPT = [3, 9, 27, 81, 50]


def config(**fields: Any) -> ExecutorConfig:
    settings = {"listen": "127.0.0.1:0", "num_threads": 1, "dtype": "float32", **fields}
    return ExecutorConfig(model="tiny", num_blocks=32, num_host_blocks=4, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
        )
    )
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def executor(folder: Path) -> Executor:
    return Executor.load(config(), folder)


class Running:
    """A started server with a channel to it."""

    def __init__(self, server: ExecutorServer, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        self.health_stub = health_pb2_grpc.HealthStub(channel)
        self.reflection_stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def claim(self, epoch: int, **expected: Any) -> Stream:
        stream = Stream(self.stub, epoch)
        await stream.call.write(
            pb.StepPlan(epoch=epoch, claim=pb.Claim(scheduler_id=f"s{epoch}", **expected))
        )
        return stream

    async def health(self, service: str = SERVICE) -> str:
        answer = await self.health_stub.Check(health_pb2.HealthCheckRequest(service=service))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    async def health_becomes(self, status: str) -> None:
        async with asyncio.timeout(WAIT):
            while await self.health() != status:  # noqa: ASYNC110 # it is asked, it does not tell
                await asyncio.sleep(0.02)


class Stream:
    """One Run stream; counts its own steps."""

    def __init__(self, stub: Any, epoch: int) -> None:
        self.call = stub.Run()
        self.epoch = epoch
        self.step_id = 0

    async def send(self, **fields: Any) -> None:
        self.step_id += 1
        plan = {"step_id": self.step_id, "previous_step_id": self.step_id - 1, **fields}
        await self.call.write(pb.StepPlan(epoch=self.epoch, **plan))

    async def read(self) -> pb.StepResult:
        result = await asyncio.wait_for(self.call.read(), WAIT)
        if result is grpc.aio.EOF:
            await self.call  # raises if the stream ended with an error
            raise AssertionError("the stream ended without a result")
        return result

    async def step(self, **fields: Any) -> pb.StepResult:
        await self.send(**fields)
        return await self.read()

    async def refusal(self) -> tuple[grpc.StatusCode, str, str]:
        """Status, reason and message with which the stream ends."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                await self.read()
        return refusal(caught.value)


def refusal(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str, str]:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None, error
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "octavo"
    return error.code(), info.reason, str(error.details())


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    """Starts servers over an engine and takes them down again."""
    running: list[ExecutorServer] = []
    channels: list[grpc.aio.Channel] = []

    async def begin(load: Callable[[], Engine], *, ready: bool = True, **fields: Any) -> Running:
        server = ExecutorServer(config(**fields), load)
        running.append(server)
        await server.start()
        if ready:
            await server.wait_ready()
        channels.append(grpc.aio.insecure_channel(server.address))
        return Running(server, channels[-1])

    yield begin
    for channel in channels:
        await channel.close()
    for server in running:
        await server.stop()


@pytest.fixture
async def running(start: Callable[..., Any], executor: Executor) -> Running:
    executor.reset()
    return await start(lambda: executor)


def row_start(row: int = 0, **fields: Any) -> pb.RowStart:
    sampling = types_pb2.SamplingParams(
        temperature=0,
        top_k=0,
        top_p=1,
        min_p=0,
        repetition_penalty=1,
        presence_penalty=0,
        frequency_penalty=0,
        seed=0,
    )
    values = {
        "tokens": PROMPT,
        "num_prompt_tokens": len(PROMPT),
        "blocks": [2, 1],
        "sampling": sampling,
        **fields,
    }
    return pb.RowStart(row=row, **values)


async def test_a_claim_is_answered_by_the_description(running: Running) -> None:
    """The first result says what the executor is, and Describe says who owns it."""
    stream = await running.claim(4)
    result = await stream.read()
    assert (result.epoch, result.step_id) == (4, 0)
    described = await running.stub.Describe(pb.DescribeRequest())
    assert described == result.description
    assert (described.owner, described.epoch) == ("s4", 4)
    assert (described.block_size, described.num_device_blocks) == (16, 32)
    assert (described.vocab_size, described.max_model_len) == (97, 128)


async def test_tokens_over_the_wire_equal_generate(running: Running, folder: Path) -> None:
    """A prompt and its decode steps give plain transformers' greedy tokens."""
    stream = await running.claim(1)
    await stream.read()
    result = await stream.step(starts=[row_start()], chunk_rows=[0], chunk_counts=[5])
    tokens = list(result.tokens)
    for step in range(9):
        result = await stream.step(decode_enter_rows=[0] if step == 0 else [])
        assert result.step_id == step + 2
        tokens += result.tokens
    model = LlamaForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([PROMPT])
    expected = model.generate(prompt, max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert tokens == expected[0, 5:].tolist()


async def test_plans_may_be_sent_ahead(running: Running) -> None:
    """Results come in order for plans sent without waiting, as many as there are."""
    stream = await running.claim(1)
    await stream.send(starts=[row_start()], chunk_rows=[0], chunk_counts=[5])
    await stream.send(decode_enter_rows=[0])
    for _ in range(20):
        await stream.send()
    await stream.call.done_writing()
    results = [await stream.read() for _ in range(23)]
    assert [result.step_id for result in results] == list(range(23))
    assert all(len(result.tokens) == 1 for result in results[1:])
    assert await stream.call.read() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_higher_epoch_takes_over(running: Running) -> None:
    """The old owner's stream ends with STALE_EPOCH and its rows are gone."""
    old = await running.claim(1)
    await old.read()
    await old.step(starts=[row_start()], chunk_rows=[0], chunk_counts=[5])
    new = await running.claim(2)
    await new.read()
    code, reason, message = await old.refusal()
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
    assert "s2 took epoch 2" in message
    result = await new.step(starts=[row_start()], chunk_rows=[0], chunk_counts=[5])
    assert len(result.tokens) == 1
    assert (await running.stub.Describe(pb.DescribeRequest())).owner == "s2"


async def test_an_old_epoch_cannot_claim(running: Running) -> None:
    """A claim with an epoch seen before is refused and the owner goes on."""
    owner = await running.claim(5)
    await owner.read()
    for epoch in (4, 5):
        code, reason, message = await (await running.claim(epoch)).refusal()
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
        assert f"epoch {epoch} is not above 5" in message
    assert (await owner.step()).step_id == 1


@pytest.mark.parametrize("expected", [{"fingerprint": "other"}, {"block_size": 32}])
async def test_a_mismatch_is_refused_at_the_claim(
    running: Running, expected: dict[str, Any]
) -> None:
    """Another model or block size is refused with both fingerprints in the message."""
    code, reason, message = await (await running.claim(1, **expected)).refusal()
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_MISMATCH")
    described = await running.stub.Describe(pb.DescribeRequest())
    assert described.fingerprint in message
    assert str(next(iter(expected.values()))) in message
    assert described.owner == ""
    matching = {"fingerprint": described.fingerprint, "block_size": described.block_size}
    assert (await (await running.claim(1, **matching)).read()).HasField("description")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"step_id": 1, "previous_step_id": 0}, "OUT_OF_ORDER"),  # repeated
        ({"step_id": 3, "previous_step_id": 2}, "OUT_OF_ORDER"),  # one lost
        ({"claim": pb.Claim(scheduler_id="again")}, "OUT_OF_ORDER"),
    ],
)
async def test_lost_and_repeated_plans_end_the_stream(
    running: Running, fields: dict[str, Any], reason: str
) -> None:
    """The stream ends after the results of the plans before, and frees the executor."""
    stream = await running.claim(1)
    await stream.read()
    await stream.send()
    await stream.send(**fields)
    assert (await stream.read()).step_id == 1
    code, told, _ = await stream.refusal()
    assert (code, told) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
    assert (await running.stub.Describe(pb.DescribeRequest())).owner == ""


async def test_a_stream_must_begin_with_a_claim(running: Running) -> None:
    """A plan without a claim before it is refused."""
    stream = Stream(running.stub, 1)
    await stream.send()
    code, reason, _ = await stream.refusal()
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "OUT_OF_ORDER")


async def test_an_invalid_plan_is_answered_until_the_next_claim(running: Running) -> None:
    """The stream stays, every later plan gets the same error, a new claim starts afresh."""
    stream = await running.claim(1)
    await stream.read()
    sampling_unset = row_start(sampling=types_pb2.SamplingParams(temperature=0))
    failed = await stream.step(starts=[sampling_unset], chunk_rows=[0], chunk_counts=[5])
    assert failed.error.kind == pb.StepError.KIND_INVALID_PLAN
    assert "sampling.top_k" in failed.error.message
    assert (await stream.step()).error == failed.error
    assert not (await running.stub.Audit(pb.AuditRequest())).rows
    again = await running.claim(2)
    await again.read()
    assert not (await again.step(starts=[row_start()])).HasField("error")


async def test_audit_digests_tables_and_lengths(running: Running) -> None:
    """Rows come with their lengths and the checksum of their table's words."""
    stream = await running.claim(1)
    await stream.read()
    await stream.step(
        starts=[row_start(7, blocks=[20, 3]), row_start(2)], chunk_rows=[7], chunk_counts=[5]
    )
    audit = await running.stub.Audit(pb.AuditRequest())
    assert (audit.epoch, audit.step_id) == (1, 1)
    assert [(row.row, row.num_tokens, row.num_computed_tokens) for row in audit.rows] == [
        (2, 5, 0),
        (7, 6, 5),
    ]
    assert audit.rows[1].table_crc32 == zlib.crc32(struct.pack("<2I", 20, 3))


async def test_an_owner_that_goes_frees_the_executor(running: Running) -> None:
    """After a cancelled stream nobody owns it, and a higher epoch may claim at once."""
    stream = await running.claim(1)
    await stream.read()
    stream.call.cancel()
    async with asyncio.timeout(WAIT):
        while (await running.stub.Describe(pb.DescribeRequest())).owner:  # noqa: ASYNC110 # likewise
            await asyncio.sleep(0.01)
    assert (await (await running.claim(2)).read()).description.owner == "s2"


async def test_health_and_reflection(running: Running) -> None:
    """Standard tools can ask whether it serves and what it offers."""
    assert await running.health("") == await running.health() == "SERVING"
    call = running.reflection_stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    async for answer in call:
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names
        break


class Gated(Engine):
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


async def test_before_the_model_is_loaded(start: Callable[..., Any], executor: Executor) -> None:
    """A server that still loads answers: not serving, and UNAVAILABLE to all else."""
    gate = threading.Event()

    def load() -> Engine:
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
    ended = await asyncio.wait_for(service, WAIT)
    assert ended.status == 1


async def test_a_busy_port_is_a_startup_error(running: Running, gated: Gated) -> None:
    """A second executor on the port is told so in one line, and does not share it."""
    second = ExecutorServer(config(listen=running.server.address), lambda: gated)
    with pytest.raises(StartupError, match="in use"):
        await second.start()
    await second.stop()
