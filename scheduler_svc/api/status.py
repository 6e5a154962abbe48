"""The one table from errors to gRPC statuses, with google.rpc details.

Every status carries an ErrorInfo of domain "octavo"; where a field is at fault a BadRequest
names it, and RESOURCE_EXHAUSTED adds a RetryInfo.
"""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from scheduler_svc import errors

DOMAIN = "octavo"
_MAX_MESSAGE_CHARACTERS = 500  # a status travels in headers, which are bounded
_NANOSECONDS = 1_000_000_000

_TABLE: dict[type[errors.OctavoError], tuple[int, str]] = {
    errors.InvalidArgument: (code_pb2.INVALID_ARGUMENT, "INVALID_FIELD"),
    errors.UnknownModel: (code_pb2.NOT_FOUND, "MODEL_NOT_SERVED"),
    errors.UnknownRequest: (code_pb2.NOT_FOUND, "REQUEST_NOT_KNOWN"),
    errors.DuplicateRequest: (code_pb2.ALREADY_EXISTS, "REQUEST_ID_IN_USE"),
    errors.NeverFits: (code_pb2.FAILED_PRECONDITION, "NEVER_FITS"),
    errors.QueueFull: (code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    errors.TenantLimit: (code_pb2.RESOURCE_EXHAUSTED, "TENANT_LIMIT"),
    errors.ApiKeyMissing: (code_pb2.UNAUTHENTICATED, "API_KEY_MISSING"),
    errors.ApiKeyUnknown: (code_pb2.UNAUTHENTICATED, "API_KEY_UNKNOWN"),
    errors.TenantMismatch: (code_pb2.PERMISSION_DENIED, "TENANT_MISMATCH"),
    errors.AdminOnly: (code_pb2.PERMISSION_DENIED, "ADMIN_ONLY"),
    errors.Unavailable: (code_pb2.UNAVAILABLE, "UNAVAILABLE"),
    errors.RequestFailed: (code_pb2.INTERNAL, "INTERNAL"),
    errors.ReaderStalled: (code_pb2.ABORTED, "READER_STALLED"),
    errors.DeadlineExceeded: (code_pb2.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
}


def from_error(error: errors.OctavoError) -> status_pb2.Status:
    """Give the status of an error; one outside the table is INTERNAL."""
    for kind in type(error).__mro__:
        if kind in _TABLE:
            code, reason = _TABLE[kind]
            return _status(code, reason, str(error), _details(error), _metadata(error))
    return internal(str(error))


def internal(message: str, request_id: str = "") -> status_pb2.Status:
    """Give the status of a fault that is not the client's.

    Args:
        message: for people; never a stack trace.
        request_id: under which the log has more.
    """
    metadata = {"request_id": request_id} if request_id else {}
    return _status(code_pb2.INTERNAL, "INTERNAL", message, [], metadata)


async def abort(context: grpc.aio.ServicerContext[Any, Any], status: status_pb2.Status) -> NoReturn:
    """End a call with a status and its details.

    Raises:  grpc.aio.AbortError: always, as grpc wants it.
    """
    final = rpc_status.to_status(status)
    await context.abort(final.code, final.details, tuple(final.trailing_metadata))


def _status(
    code: int, reason: str, message: str, details: list[Message], metadata: dict[str, str]
) -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)
    packed = []
    for detail in [info, *details]:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code, message=_shorten(message), details=packed)


def _details(error: errors.OctavoError) -> list[Message]:
    if isinstance(error, errors.InvalidArgument | errors.TenantMismatch):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=_shorten(str(error))
        )
        return [error_details_pb2.BadRequest(field_violations=[violation])]
    if isinstance(error, errors.QueueFull | errors.TenantLimit):
        seconds, rest = divmod(error.retry_seconds, 1)
        delay = duration_pb2.Duration(seconds=int(seconds), nanos=int(rest * _NANOSECONDS))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]
    return []


def _metadata(error: errors.OctavoError) -> dict[str, str]:
    if isinstance(error, errors.TenantLimit):
        return {"limit": error.limit, "value": str(error.value)}
    return {}


def _shorten(message: str) -> str:
    if len(message) <= _MAX_MESSAGE_CHARACTERS:
        return message
    return message[: _MAX_MESSAGE_CHARACTERS - 1] + "…"
