"""What can go wrong when you talk to Octavo.

OctavoError
├── InvalidArgument     a field is out of bounds; carries field and bound
├── NotFound            the model is not the one served
├── AlreadyExists       request_id belongs to a live request
├── NeverFits           the request is larger than the whole KV pool
├── Unauthenticated     the API key is missing, unknown or revoked
├── PermissionDenied    the API key does not allow this
├── Overloaded          the queue is full, or a tenant's limit reached; carries retry_after
├── Unavailable         draining, or no executor
│   └── ConnectionFailed    nothing answers at the target
├── TlsFailed           the target's certificate, or the client's, is not what it must be
├── DeadlineExceeded    the deadline passed
├── Cancelled           the caller cancelled
└── Internal            the service failed, or broke its own contract

No gRPC in here: `_status.py` maps status codes to these, in one table.
"""

from __future__ import annotations

from collections.abc import Mapping


class OctavoError(Exception):
    """Base of everything that this client raises.

    Attributes:
        reason: the service's constant for what is wrong (ErrorInfo), or "".
        metadata: the service's facts about it (ErrorInfo), by name.
    """

    def __init__(
        self, message: str, *, reason: str = "", metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata: Mapping[str, str] = dict(metadata or {})


class InvalidArgument(OctavoError):
    """A field of the request is out of bounds.

    Attributes:
        field: its path in the request, such as "sampling.temperature", or "".
        bound: what it may be, such as "must be between 0 and 100", or "".
    """

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        bound: str = "",
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.field = field
        self.bound = bound


class NotFound(OctavoError):
    """The model asked for is not the one served."""


class AlreadyExists(OctavoError):
    """A live request already has this request_id."""


class NeverFits(OctavoError):
    """The request needs more KV blocks than the whole pool has: waiting won't help."""


class Unauthenticated(OctavoError):
    """The API key is missing, unknown or revoked: `reason` says which."""


class PermissionDenied(OctavoError):
    """The API key does not allow this: another tenant, or the service's administration."""


class Overloaded(OctavoError):
    """The queue is full, or the tenant has reached a limit that `metadata` names.

    Attributes:
        retry_after: seconds until it is worth asking again; None: not said.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after: float | None = None,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.retry_after = retry_after


class Unavailable(OctavoError):
    """The service drains, has no executor, or went away.

    Attributes:
        retry_after: seconds until it is worth asking again; None: not said.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after: float | None = None,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata)
        self.retry_after = retry_after


class ConnectionFailed(Unavailable):
    """Nothing answers at the target."""


class TlsFailed(OctavoError):
    """The target's certificate, or the client's, is not what it must be: waiting won't help."""


class DeadlineExceeded(OctavoError):
    """The deadline passed before the answer was complete."""


class Cancelled(OctavoError):
    """The caller cancelled, so there is no complete answer."""


class Internal(OctavoError):
    """The service failed, or broke its own contract."""
