"""The scheduler's errors, without gRPC in them.

OctavoError
├── InvalidArgument     a field of a request is out of bounds
├── UnknownModel        the model asked for is not the one served
├── UnknownRequest      no live or lately ended request has this request_id
├── DuplicateRequest    request_id belongs to a live request
├── NeverFits           the request is larger than the whole KV pool
├── QueueFull           the bounded queue is full; carries a retry delay
├── TenantLimit         the tenant has reached one of its limits; carries a retry delay
├── ApiKeyMissing       the call brings no API key
├── ApiKeyUnknown       the call's API key is not known, or was revoked
├── TenantMismatch      the request names another tenant than its key's
├── AdminOnly           the method needs an admin key
├── Unavailable         draining, or no executor is connected
├── DeadlineExceeded    the deadline passed while the request waited
├── ReaderStalled       the client took nothing of its stream for too long
├── RequestFailed       the service could not go on with this request
└── StartupError        the service cannot start; one line says what to do

`status.py` maps them to gRPC status codes, in one table.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors that a caller may see."""


class InvalidArgument(OctavoError):
    """A field is out of bounds.

    Attributes:
        field: path of the field in the request, such as "sampling.temperature".
        bound: what the field may be, such as "between 0 and 100".
    """

    def __init__(self, field: str, bound: str, got: object = None) -> None:
        """Name the field, its bound and, if it may be shown, what came instead."""
        suffix = "" if got is None else f", got {got}"
        super().__init__(f"{field} must be {bound}{suffix}")
        self.field = field
        self.bound = bound


class UnknownModel(OctavoError):
    """The model asked for is not the one served."""


class UnknownRequest(OctavoError):
    """No live or lately ended request has this request_id."""


class DuplicateRequest(OctavoError):
    """A live request already has this request_id."""


class NeverFits(OctavoError):
    """The request needs more KV blocks than the whole pool has."""


class QueueFull(OctavoError):
    """The queue is full.

    Attributes:
        retry_seconds: when to come back.
    """

    def __init__(self, message: str, retry_seconds: float) -> None:
        """Say why, and when to come back."""
        super().__init__(message)
        self.retry_seconds = retry_seconds


class TenantLimit(OctavoError):
    """The tenant has reached one of its limits.

    Attributes:
        limit: name of the limit, such as "max_requests_per_minute".
        value: what it is set to.
        retry_seconds: when to come back.
    """

    def __init__(self, tenant: str, limit: str, value: int | None, retry_seconds: float) -> None:
        """Name the tenant and its limit, and say when to come back."""
        super().__init__(f"tenant {tenant!r} has reached its {limit} of {value}")
        self.limit = limit
        self.value = value
        self.retry_seconds = retry_seconds


class ApiKeyMissing(OctavoError):
    """The call brings no API key."""


class ApiKeyUnknown(OctavoError):
    """The call's API key is not known, or was revoked."""


class TenantMismatch(OctavoError):
    """The request names another tenant than its API key's.

    Attributes:
        field: path of the field in the request.
    """

    field = "tenant"

    def __init__(self, tenant: str) -> None:
        """Name the tenant that the key has."""
        super().__init__(f"{self.field} must be empty or the API key's own, {tenant!r}")


class AdminOnly(OctavoError):
    """The method needs an admin key."""


class Unavailable(OctavoError):
    """Draining, or no executor is connected."""


class DeadlineExceeded(OctavoError):
    """The deadline passed before the request was done."""


class ReaderStalled(OctavoError):
    """The client took nothing of its stream for too long."""


class RequestFailed(OctavoError):
    """The service could not go on with this request; others are not concerned."""


class StartupError(OctavoError):
    """The service cannot start; the message is one line that says what to do."""
