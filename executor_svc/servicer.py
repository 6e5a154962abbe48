"""`octavo.v1.ExecutorService` over asyncio: claims, who asks, errors as statuses.

The table below is the only place where this service's errors become gRPC statuses.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from octavo.tracing import Tracing
from octavo.v1 import executor_pb2 as pb

from executor_svc.codec import Malformed, deserializer, require_message
from executor_svc.contenders import Contenders
from executor_svc.device_thread import DeviceThread
from executor_svc.errors import (
    DeviceLost,
    Draining,
    ExecutorError,
    InvalidRequest,
    ModelMismatch,
    NotReady,
    OutOfOrder,
    ReaderStalled,
    StaleEpoch,
)
from executor_svc.logs import get_logger
from executor_svc.metrics import Metrics
from executor_svc.ownership import Lease, Ownership
from executor_svc.plan import Description
from executor_svc.plan_stream import PlanStream, RunContext
from executor_svc.step_spans import StepSpans
from executor_svc.wire import audit_to_proto, description_to_proto

_log = get_logger(__name__)

_DOMAIN = "octavo"
_MAX_NAME_CHARACTERS = 128

# A connection that breaks looks like an owner that leaves: gRPC ends the plans first, and
# cancels the call a moment later.
_LINGER_SECONDS = 0.05

_STATUS: dict[type[ExecutorError], tuple[int, str]] = {
    InvalidRequest: (code_pb2.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
    StaleEpoch: (code_pb2.FAILED_PRECONDITION, "STALE_EPOCH"),
    ModelMismatch: (code_pb2.FAILED_PRECONDITION, "MODEL_MISMATCH"),
    OutOfOrder: (code_pb2.FAILED_PRECONDITION, "OUT_OF_ORDER"),
    ReaderStalled: (code_pb2.ABORTED, "READER_STALLED"),
    NotReady: (code_pb2.UNAVAILABLE, "NOT_READY"),
    Draining: (code_pb2.UNAVAILABLE, "DRAINING"),
    DeviceLost: (code_pb2.INTERNAL, "DEVICE_LOST"),
}

_SERVICE = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name


class ExecutorServicer:
    """Takes plans for the device thread, from the scheduler that owns this executor.

    Attributes:
        instance: made for this process, so that two addresses of it can be told.
        metrics: of the executor.
        tracing: makes spans of what it computes; None: there are none.
    """

    def __init__(self, device: DeviceThread) -> None:
        self._device = device
        self.tracing: Tracing | None = None
        self._ownership = Ownership()
        self._contenders = Contenders()
        self.instance = secrets.token_hex(8)
        self._draining = asyncio.Event()
        reasons = [reason for _, reason in _STATUS.values()]
        self.metrics = Metrics(device, self._ownership, self._draining.is_set, reasons)

    @property
    def lease(self) -> Lease | None:
        """The current ownership, if any."""
        return self._ownership.lease

    def drain(self) -> None:
        """Take no new owner, and tell the present one, whose stream goes on."""
        self._draining.set()

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
        """Say what this executor is, who owns it and who else asks."""
        try:
            name = require_message(request).scheduler_id
            if len(name) > _MAX_NAME_CHARACTERS:
                raise InvalidRequest(
                    f"scheduler_id must be at most {_MAX_NAME_CHARACTERS} characters, "
                    f"got {len(name)}"
                )
            self._contenders.note(name)
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
            require_message(request)
            self._description()
            audit = await asyncio.wrap_future(self._device.audit())
        except (InvalidRequest, NotReady, DeviceLost) as error:
            await _abort(context, error)
        return audit_to_proto(audit.rows, epoch=audit.epoch, step_id=audit.step_id)

    async def Run(  # gRPC's name
        self, request_iterator: AsyncIterator[pb.StepPlan | Malformed], context: RunContext
    ) -> None:
        """Answer each plan of the owner with one result, in order."""
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        try:
            lease = await self._claim(require_message(first))
        except ExecutorError as error:
            claimant = "" if isinstance(first, Malformed) else first.claim.scheduler_id
            _log.info("claim_refused", scheduler_id=claimant, reason=str(error))
            self.metrics.note_refused_claim(_status_of(error)[1])
            await _abort(context, error)
        log = _log.bind(scheduler_id=lease.scheduler_id, epoch=lease.epoch)
        log.info("executor_claimed")
        self.metrics.note_claim()
        try:
            await self._serve(lease, request_iterator, context)
            log.info("owner_left")
            self.metrics.note_ended_stream("LEFT")
        except ExecutorError as error:
            log.warning("stream_ended", reason=str(error))
            self.metrics.note_ended_stream(_status_of(error)[1])
            # Freed before it is told: an owner that reads nothing takes no status either.
            self._ownership.release(lease)
            await _abort(context, error)
        except (asyncio.CancelledError, grpc.aio.InternalError) as error:
            log.warning("owner_lost")
            self.metrics.note_ended_stream("LOST")
            self._contenders.forget(lease.scheduler_id)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._ownership.release(lease)

    async def _claim(self, first: pb.StepPlan) -> Lease:
        description = self._description()
        if self._draining.is_set():
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

    async def _serve(
        self,
        lease: Lease,
        plans: AsyncIterator[pb.StepPlan | Malformed],
        context: RunContext,
    ) -> None:
        """Answer the claim, then plans until the owner leaves.

        Raises:
            ExecutorError: the reason for which the stream may not go on.
        """
        stream = PlanStream(lease, self._device, context, StepSpans(self.tracing), self.metrics)
        description = self._describe(self._description())
        await stream.write(pb.StepResult(epoch=lease.epoch, description=description))
        await stream.follow(plans, self._draining)
        await asyncio.sleep(_LINGER_SECONDS)

    def _description(self) -> Description:
        ready = self._device.ready
        if not ready.done() or ready.exception() is not None:
            raise NotReady("the model is still loading")
        return ready.result()

    def _describe(self, description: Description) -> pb.DescribeResponse:
        owner = self._ownership.owner
        return description_to_proto(
            description,
            instance=self.instance,
            epoch=self._ownership.epoch,
            owner=owner,
            schedulers=self._contenders.names(owner),
            draining=self._draining.is_set(),
        )


def _status_of(error: ExecutorError) -> tuple[int, str]:
    """The gRPC status code and the reason of an error."""
    return _STATUS.get(type(error), (code_pb2.INTERNAL, "INTERNAL"))


async def _abort(context: grpc.aio.ServicerContext[Any, Any], error: ExecutorError) -> NoReturn:
    """End the call with the error's status and a google.rpc.ErrorInfo."""
    code, reason = _status_of(error)
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=_DOMAIN))
    status = rpc_status.to_status(
        status_pb2.Status(code=code, message=str(error), details=[detail])
    )
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort returned")
