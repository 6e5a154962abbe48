"""An executor's service in this process, and a scheduler's side of the wire by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from grpc_status import rpc_status
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc, types_pb2

from executor_svc.config import ExecutorConfig
from executor_svc.server import SERVICE, ExecutorServer

WAIT = 30.0
PROMPT = [3, 9, 27, 81, 50]


def config(**fields: Any) -> ExecutorConfig:
    settings = {"listen": "127.0.0.1:0", "num_threads": 1, "dtype": "float32", **fields}
    return ExecutorConfig(model="tiny", num_blocks=32, num_host_blocks=4, **settings)


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
            while await self.health() != status:  # it is asked, it does not tell
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
