"""gRPC status to exception: one table, plus the google.rpc details."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from octavo_client.errors import (
    AlreadyExists,
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NeverFits,
    NotFound,
    OctavoError,
    Overloaded,
    PermissionDenied,
    TlsFailed,
    Unauthenticated,
    Unavailable,
)

_DETAILS_KEY = "grpc-status-details-bin"

_BY_CODE: dict[grpc.StatusCode, type[OctavoError]] = {
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: NeverFits,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}

# gRPC tells "nothing listens there" from "the service said UNAVAILABLE" by text only.
_CONNECT_PHRASES = ("failed to connect", "connections to all backends failing", "dns resolution")


# What gRPC's text has when a handshake failed, and what to tell people.
_UNKNOWN_CA = "its certificate comes from no CA that the client trusts: ca_file names them"
_OTHER_NAME = "its certificate is for another name: server_name says which to expect"
_TLS_FAULTS = (
    ("certificate_verify_failed", _UNKNOWN_CA),
    ("certificate signature failure", _UNKNOWN_CA),  # a CA of the same name with another key
    ("hostname verification", _OTHER_NAME),
    ("not in peer certificate", _OTHER_NAME),
    ("wrong_version_number", "it does not speak TLS"),
)


def error_from_status(
    code: grpc.StatusCode,
    message: str,
    trailers: Iterable[tuple[str, Any]],
    target: str,
) -> OctavoError:
    """Build the exception for a failed call, with what its details say.

    Args:
        code: status code of the call.
        message: its message.
        trailers: trailing metadata, where the details travel.
        target: whom the call went to, for the message of a failed connection.
    """
    details = _parse_details(trailers)
    info = details.get(error_details_pb2.ErrorInfo)
    reason = info.reason if info else ""
    metadata = dict(info.metadata) if info else {}
    delay = details.get(error_details_pb2.RetryInfo)
    retry_after = delay.retry_delay.ToTimedelta().total_seconds() if delay else None
    if code is grpc.StatusCode.INVALID_ARGUMENT or code is grpc.StatusCode.OUT_OF_RANGE:
        bad = details.get(error_details_pb2.BadRequest)
        first = bad.field_violations[0] if bad and bad.field_violations else None
        return InvalidArgument(
            message,
            field=first.field if first else "",
            bound=first.description if first else "",
            reason=reason,
            metadata=metadata,
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(message, retry_after=retry_after, reason=reason, metadata=metadata)
    if code is grpc.StatusCode.UNAVAILABLE:
        unreached = None if details else _unreached(message.lower(), target)
        return unreached or Unavailable(
            message, retry_after=retry_after, reason=reason, metadata=metadata
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return Internal(f"the server at {target} is no Octavo scheduler: {message}")
    return _BY_CODE.get(code, Internal)(message, reason=reason, metadata=metadata)


def _unreached(text: str, target: str) -> OctavoError | None:
    """Say why a target was not reached, by gRPC's text in lower case; None: it was."""
    if not any(phrase in text for phrase in _CONNECT_PHRASES):
        return None
    for phrase, problem in _TLS_FAULTS:
        if phrase in text:
            return TlsFailed(f"the TLS connection to {target} failed: {problem}")
    if "socket closed" in text:
        return Unavailable(
            f"{target} hangs up: does it speak TLS (grpcs://, ca_file), or want a certificate of "
            "a CA that it knows (cert_file, key_file)?"
        )
    return ConnectionFailed(f"nothing answers at {target}: is `octavo serve` running there?")


def _parse_details(trailers: Iterable[tuple[str, Any]]) -> dict[Any, Any]:
    """Unpack the first detail of each known kind; garbage counts as none."""
    found: dict[Any, Any] = {}
    for key, value in trailers:
        if key != _DETAILS_KEY:
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except Exception:  # a proxy's garbage must not hide the status itself
            return found
        for packed in status.details:
            for kind in (
                error_details_pb2.BadRequest,
                error_details_pb2.RetryInfo,
                error_details_pb2.ErrorInfo,
            ):
                detail = kind()
                if packed.Unpack(detail):
                    found.setdefault(kind, detail)
    return found
