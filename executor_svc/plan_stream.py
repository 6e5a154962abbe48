"""The owner's Run stream: its plans to the device in order, their results back in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from octavo.v1 import executor_pb2 as pb

from executor_svc.codec import Malformed, require_message
from executor_svc.device_thread import DeviceThread
from executor_svc.errors import ClaimRefused, ExecutorError, OutOfOrder, ReaderStalled
from executor_svc.metrics import Metrics
from executor_svc.ownership import Lease
from executor_svc.plan import Outcome
from executor_svc.step_spans import StepSpans
from executor_svc.wire import read_plan, result_to_proto

WRITE_SECONDS = 15.0
"""How long an owner may leave a result unread: as long as keep-alive takes to miss one."""

# Plans of one stream that are neither answered nor held back on the wire.
_MAX_PLANS_TAKEN = 8

RunContext = grpc.aio.ServicerContext[pb.StepPlan, pb.StepResult]
_Answer = asyncio.Future[Outcome]
# What is to be written next: a result to wait for, the reason to end, or the end.
_Pending = asyncio.Queue[_Answer | ExecutorError | None]


class PlanStream:
    """One lease at work.

    Invariant: a message is written whole before the next one, and within WRITE_SECONDS.
    """

    def __init__(
        self,
        lease: Lease,
        device: DeviceThread,
        context: RunContext,
        spans: StepSpans,
        metrics: Metrics,
    ) -> None:
        self._lease = lease
        self._spans = spans
        self._metrics = metrics
        self._device = device
        self._context = context
        self._writing = asyncio.Lock()
        self._pending: _Pending = asyncio.Queue(_MAX_PLANS_TAKEN)

    async def write(self, result: pb.StepResult) -> None:
        """Send one message.

        Raises:
            ReaderStalled: if the owner answers keep-alives and takes nothing else.
        """
        async with self._writing:
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._context.write(result)
            except TimeoutError:
                raise ReaderStalled(f"no result was read for {WRITE_SECONDS:g} s") from None

    async def follow(
        self, plans: AsyncIterator[pb.StepPlan | Malformed], draining: asyncio.Event
    ) -> None:
        """Read and answer plans until the stream ends or the lease does.

        Args:
            plans: those after the claim.
            draining: when it is set the owner is told, and the stream goes on.

        Raises:
            ExecutorError: the reason for which the stream may not go on.
        """
        reader = asyncio.create_task(self._read(plans))
        writer = asyncio.create_task(self._answer())
        ended = asyncio.create_task(self._lease.wait_end())
        teller = asyncio.create_task(self._tell(draining))
        tasks: set[asyncio.Task[Any]] = {reader, writer, ended, teller}
        watched = tasks
        try:
            while not writer.done():
                done, watched = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    raise ended.result()
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._spans.close()

    async def _read(self, plans: AsyncIterator[pb.StepPlan | Malformed]) -> None:
        try:
            async for received in plans:
                message = require_message(received)
                if message.HasField("claim"):
                    raise OutOfOrder("a claim came in the middle of a stream")
                self._lease.follow(
                    epoch=message.epoch,
                    step_id=message.step_id,
                    previous_step_id=message.previous_step_id,
                )
                await self._pending.put(self._submit(message))
        except ClaimRefused as error:
            await self._pending.put(error)
        else:
            await self._pending.put(None)

    async def _answer(self) -> None:
        while (answer := await self._pending.get()) is not None:
            if isinstance(answer, ExecutorError):
                raise answer
            outcome = await answer
            self._spans.note_result(outcome)
            self._metrics.note_outcome(outcome)
            await self.write(result_to_proto(outcome))

    async def _tell(self, draining: asyncio.Event) -> None:
        """Say that the executor drains: between two results, not behind a step that is long."""
        await draining.wait()
        await self.write(pb.StepResult(epoch=self._lease.epoch, draining=True))

    def _submit(self, message: pb.StepPlan) -> _Answer:
        self._spans.note_plan(message)
        answer = asyncio.wrap_future(self._device.submit(read_plan(message)))
        # If the stream ends first nobody waits for it, and asyncio would call that an error.
        answer.add_done_callback(_see_exception)
        return answer


def _see_exception(answer: _Answer) -> None:
    if not answer.cancelled():
        answer.exception()
