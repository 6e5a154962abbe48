"""Simulated executors for `octavo bench core --rate --wire`: a process of its own.

Usage: python -P -m scheduler_svc.bench_executors DESCRIPTION_JSON NUM STEPS_PER_SECOND

They speak the plan protocol over gRPC, but compute nothing: a step takes its fixed time on
the clock and draws token 1 for everyone. Enough of a row is kept to know who draws.
The first line of output is a JSON list of their addresses. After that every line on stdin
is answered by one of counts over all of them; the end of stdin ends the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

import grpc
from octavo.protocol import PLAN_PROTOCOL
from octavo.v1 import executor_pb2 as pb

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_ADDRESS = "127.0.0.1"
_SERVICE = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name


@dataclass(slots=True)
class StepCounts:
    """Totals over all executors that grow.

    Attributes:
        steps: taken.
        late: of those, steps whose plan was not there when the step before ended.
        cpu_seconds: of this process, when the counts were asked for.
    """

    steps: int = 0
    late: int = 0
    cpu_seconds: float = 0.0


class Rows:
    """Who draws a token in a step; without forks, beams and preemption.

    Invariant: a row has as many pending tokens as are known and not computed; in the decode
    set that is always one.
    """

    def __init__(self) -> None:
        """Start without rows."""
        self._pending: dict[int, int] = {}
        self._decode: set[int] = set()

    def step(self, plan: pb.StepPlan) -> int:
        """Carry out a plan; returns how many rows draw a token."""
        for row in plan.finish_rows:
            del self._pending[row]
            self._decode.discard(row)
        for start in plan.starts:
            self._pending[start.row] = len(start.tokens) - start.num_computed_tokens
        self._decode.difference_update(plan.decode_leave_rows)
        self._decode.update(plan.decode_enter_rows)
        num_drawn = len(self._decode)
        for row, count in zip(plan.chunk_rows, plan.chunk_counts, strict=True):
            self._pending[row] -= count
            if not self._pending[row]:
                self._pending[row] = 1
                num_drawn += 1
        return num_drawn


class SimulatedExecutors:
    """As many executors as there are streams."""

    def __init__(self, description: pb.DescribeResponse, period_seconds: float) -> None:
        """Let every step take one period."""
        self._description = description
        self._period_seconds = period_seconds
        self.counts = StepCounts()

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Give the part of the service that is simulated, to register."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self._describe,
                request_deserializer=pb.DescribeRequest.FromString,
                response_serializer=pb.DescribeResponse.SerializeToString,
            ),
            "Run": grpc.stream_stream_rpc_method_handler(
                self._run,
                request_deserializer=pb.StepPlan.FromString,
                response_serializer=pb.StepResult.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler(_SERVICE, methods)

    async def _describe(self, _request: pb.DescribeRequest, _context: Any) -> pb.DescribeResponse:
        return self._description

    async def _run(self, plans: AsyncIterator[pb.StepPlan], context: Any) -> None:
        """Answer each plan once its time is over."""
        claim = await anext(aiter(plans))
        await context.write(pb.StepResult(epoch=claim.epoch, description=self._description))
        arrived: asyncio.Queue[tuple[float, pb.StepPlan]] = asyncio.Queue()
        answers = asyncio.create_task(self._answer(arrived, context))
        clock = asyncio.get_running_loop().time
        try:
            async for plan in plans:
                arrived.put_nowait((clock(), plan))
        finally:
            answers.cancel()

    async def _answer(
        self, arrived: asyncio.Queue[tuple[float, pb.StepPlan]], context: Any
    ) -> None:
        rows, clock = Rows(), asyncio.get_running_loop().time
        ended = clock()
        while True:
            since, plan = await arrived.get()
            idle_seconds = max(0.0, since - ended)
            self.counts.steps += 1
            self.counts.late += idle_seconds > 0
            ended = max(since, ended) + self._period_seconds
            tokens = [1] * rows.step(plan)
            timings = pb.StepTimings(
                idle_ns=int(idle_seconds * 1e9), forward_ns=int(self._period_seconds * 1e9)
            )
            await asyncio.sleep(max(0.0, ended - clock()))
            await context.write(
                pb.StepResult(
                    epoch=plan.epoch, step_id=plan.step_id, tokens=tokens, timings=timings
                )
            )


async def _serve(description: pb.DescribeResponse, num: int, rate: float) -> None:
    executors = SimulatedExecutors(description, 1 / rate)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES)])
    server.add_generic_rpc_handlers((executors.handlers(),))
    ports = [server.add_insecure_port(f"{_ADDRESS}:0") for _ in range(num)]
    await server.start()
    _write([f"{_ADDRESS}:{port}" for port in ports])
    closed = asyncio.Event()

    def answer() -> None:
        if os.read(sys.stdin.fileno(), 4096):
            executors.counts.cpu_seconds = time.process_time()
            _write(asdict(executors.counts))
        else:
            closed.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), answer)
    await closed.wait()
    await server.stop(0)


def _write(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main(argv: list[str]) -> None:
    """Serve until stdin ends."""
    description, num, rate = argv
    described = pb.DescribeResponse(plan_protocol=PLAN_PROTOCOL, **json.loads(description))
    asyncio.run(_serve(described, int(num), float(rate)))


if __name__ == "__main__":
    main(sys.argv[1:])
