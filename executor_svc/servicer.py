"""`octavo.v1.ExecutorService` over asyncio: claims, order of plans, errors as statuses.

The table below is the only place where this service's errors become gRPC statuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from octavo.v1 import executor_pb2 as pb

from executor_svc.codec import Malformed, deserializer
from executor_svc.device_thread import DeviceThread
from executor_svc.errors import (
    ClaimRefused,
    DeviceLost,
    Draining,
    ExecutorError,
    InvalidPlan,
    InvalidRequest,
    ModelMismatch,
    NotReady,
    OutOfOrder,
    StaleEpoch,
)
from executor_svc.logs import get_logger
from executor_svc.ownership import Lease, Ownership
from executor_svc.plan import Description, Outcome, Plan, StepError, StepErrorKind
from executor_svc.wire import (
    audit_to_proto,
    description_to_proto,
    plan_from_proto,
    result_to_proto,
)

_log = get_logger(__name__)

_DOMAIN = "octavo"

# Plans of one stream that are neither answered nor held back on the wire.
_MAX_PLANS_TAKEN = 8

_STATUS: dict[type[ExecutorError], tuple[int, str]] = {
    InvalidRequest: (code_pb2.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
    StaleEpoch: (code_pb2.FAILED_PRECONDITION, "STALE_EPOCH"),
    ModelMismatch: (code_pb2.FAILED_PRECONDITION, "MODEL_MISMATCH"),
    OutOfOrder: (code_pb2.FAILED_PRECONDITION, "OUT_OF_ORDER"),
    NotReady: (code_pb2.UNAVAILABLE, "NOT_READY"),
    Draining: (code_pb2.UNAVAILABLE, "DRAINING"),
    DeviceLost: (code_pb2.INTERNAL, "DEVICE_LOST"),
}

_SERVICE = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name

_RunContext = grpc.aio.ServicerContext[pb.StepPlan, pb.StepResult]
M = TypeVar("M", bound=Message)
_Answer = asyncio.Future[Outcome]
# What is to be written next: a result to wait for, the reason to end, or the end.
_Pending = asyncio.Queue[_Answer | ExecutorError | None]


class ExecutorServicer:
    """Takes plans for the device thread, from the scheduler that owns this executor."""

    def __init__(self, device: DeviceThread) -> None:
        self._device = device
        self._ownership = Ownership()
        self._draining = False

    @property
    def lease(self) -> Lease | None:
        """The current ownership, if any."""
        return self._ownership.lease

    def drain(self) -> None:
        """Take no new owner; the present one's stream goes on."""
        self._draining = True

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Give the service to register: its methods, over bytes that may be no message."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Describe": grpc.unary_unary_rpc_method_handler(
                self.Describe,
                request_deserializer=deserializer(pb.DescribeRequest),
                response_serializer=pb.DescribeResponse.SerializeToString,
            ),
            "Audit": grpc.unary_unary_rpc_method_handler(
                self.Audit,
                request_deserializer=deserializer(pb.AuditRequest),
                response_serializer=pb.AuditResponse.SerializeToString,
            ),
            "Run": grpc.stream_stream_rpc_method_handler(
                self.Run,
                request_deserializer=deserializer(pb.StepPlan),
                response_serializer=pb.StepResult.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler(_SERVICE, methods)

    async def Describe(  # gRPC's name
        self,
        request: pb.DescribeRequest | Malformed,
        context: grpc.aio.ServicerContext[pb.DescribeRequest, pb.DescribeResponse],
    ) -> pb.DescribeResponse:
        """Say what this executor is, and who owns it now."""
        try:
            _require_message(request)
            return self._describe(self._description())
        except (InvalidRequest, NotReady) as error:
            await _abort(context, error)

    async def Audit(  # gRPC's name
        self,
        request: pb.AuditRequest | Malformed,
        context: grpc.aio.ServicerContext[pb.AuditRequest, pb.AuditResponse],
    ) -> pb.AuditResponse:
        """Give the digest of every row between two steps."""
        try:
            _require_message(request)
            self._description()
            audit = await asyncio.wrap_future(self._device.audit())
        except (InvalidRequest, NotReady, DeviceLost) as error:
            await _abort(context, error)
        return audit_to_proto(audit.rows, epoch=audit.epoch, step_id=audit.step_id)

    async def Run(  # gRPC's name
        self, request_iterator: AsyncIterator[pb.StepPlan | Malformed], context: _RunContext
    ) -> None:
        """Answer each plan of the owner with one result, in order."""
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        try:
            lease = await self._claim(_require_message(first))
        except ExecutorError as error:
            claimant = "" if isinstance(first, Malformed) else first.claim.scheduler_id
            _log.info("claim_refused", scheduler_id=claimant, reason=str(error))
            await _abort(context, error)
        log = _log.bind(scheduler_id=lease.scheduler_id, epoch=lease.epoch)
        log.info("executor_claimed")
        try:
            await context.write(
                pb.StepResult(epoch=lease.epoch, description=self._describe(self._description()))
            )
            await self._follow(lease, request_iterator, context)
            log.info("owner_left")
        except ExecutorError as error:
            log.warning("stream_ended", reason=str(error))
            await _abort(context, error)
        finally:
            self._ownership.release(lease)

    async def _claim(self, first: pb.StepPlan) -> Lease:
        description = self._description()
        if self._draining:
            raise Draining("this executor is shutting down")
        if not first.HasField("claim") or first.step_id or first.previous_step_id:
            raise OutOfOrder("the first plan of a stream must be a claim with step_id 0")
        lease = self._ownership.claim(
            description,
            scheduler_id=first.claim.scheduler_id,
            epoch=first.epoch,
            fingerprint=first.claim.fingerprint,
            block_size=first.claim.block_size,
        )
        try:
            await asyncio.wrap_future(self._device.claim(lease.epoch))
        except BaseException:
            self._ownership.release(lease)
            raise
        return lease

    async def _follow(
        self, lease: Lease, plans: AsyncIterator[pb.StepPlan | Malformed], context: _RunContext
    ) -> None:
        """Read and answer plans until the stream ends or the lease does.

        Raises:
            ExecutorError: the reason for which the stream may not go on.
        """
        pending: _Pending = asyncio.Queue(_MAX_PLANS_TAKEN)
        reader = asyncio.create_task(self._read(lease, plans, pending))
        writer = asyncio.create_task(_write(pending, context))
        try:
            watched: set[asyncio.Future[Any]] = {reader, writer, lease.ended}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
                watched.remove(reader)
                await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if lease.ended.done():
                raise lease.ended.result()
            await writer
        finally:
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(
        self, lease: Lease, plans: AsyncIterator[pb.StepPlan | Malformed], pending: _Pending
    ) -> None:
        try:
            async for received in plans:
                message = _require_message(received)
                if message.HasField("claim"):
                    raise OutOfOrder("a claim came in the middle of a stream")
                lease.follow(
                    epoch=message.epoch,
                    step_id=message.step_id,
                    previous_step_id=message.previous_step_id,
                )
                await pending.put(self._submit(message))
        except ClaimRefused as error:
            await pending.put(error)
        else:
            await pending.put(None)

    def _submit(self, message: pb.StepPlan) -> _Answer:
        try:
            plan = plan_from_proto(message)
        except InvalidPlan as error:
            # It must fail in its turn, and fail the steps after it: the engine does both.
            plan = Plan(
                epoch=message.epoch,
                step_id=message.step_id,
                broken=StepError(StepErrorKind.INVALID_PLAN, str(error)),
            )
        answer = asyncio.wrap_future(self._device.submit(plan))
        # If the stream ends first nobody waits for it, and asyncio would call that an error.
        answer.add_done_callback(_see_exception)
        return answer

    def _description(self) -> Description:
        ready = self._device.ready
        if not ready.done() or ready.exception() is not None:
            raise NotReady("the model is still loading")
        return ready.result()

    def _describe(self, description: Description) -> pb.DescribeResponse:
        return description_to_proto(
            description, epoch=self._ownership.epoch, owner=self._ownership.owner
        )


def _require_message(received: M | Malformed) -> M:
    if isinstance(received, Malformed):
        raise InvalidRequest(str(received))
    return received


def _see_exception(answer: _Answer) -> None:
    if not answer.cancelled():
        answer.exception()


async def _write(pending: _Pending, context: _RunContext) -> None:
    while (answer := await pending.get()) is not None:
        if isinstance(answer, ExecutorError):
            raise answer
        await context.write(result_to_proto(await answer))


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: ExecutorError) -> NoReturn:
    """End the call with the error's status and a google.rpc.ErrorInfo."""
    code, reason = _STATUS.get(type(error), (code_pb2.INTERNAL, "INTERNAL"))
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=_DOMAIN))
    status = rpc_status.to_status(
        status_pb2.Status(code=code, message=str(error), details=[detail])
    )
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")
