"""Errors as OpenAI's clients know them, and the one table that leads to them.

ApiError        an answer with a status and a body; all that a caller ever sees
StartupError    the gateway cannot start; one line says what to do
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from octavo_client.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NeverFits,
    NotFound,
    OctavoError,
    Overloaded,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)

from octavo_gateway.names import FieldNames

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RETRY_SECONDS = 1.0  # where the scheduler names no delay
_TOO_LARGE = "larger than max"  # gRPC's transport refuses so, without details


class StartupError(Exception):
    """The gateway cannot start; the message is one line that says what to do."""


class ApiError(Exception):
    """An answer other than the one asked for.

    Attributes:
        status: of HTTP.
        kind: OpenAI's error type.
        param: the parameter that is wrong, as the caller named it.
        code: a constant for programs.
        retry_after: seconds until it is worth asking again; None: not said.
        headers: more that the answer carries.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.headers = dict(headers or {})
        if retry_after is not None:
            # In whole seconds, rounded up: to come back early is to be refused again.
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that says so."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(param: str, bound: str, *, code: str | None = None) -> ApiError:
    """Give the refusal of one parameter: "PARAM BOUND", as in "n must be at least 1"."""
    return ApiError(400, f"{param} {bound}", param=param, code=code)


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    kind: str
    code: str
    retries: bool = False


_TABLE: dict[type[OctavoError], _Row] = {
    NeverFits: _Row(400, INVALID_REQUEST, "context_length_exceeded"),
    Unauthenticated: _Row(401, "authentication_error", "invalid_api_key"),
    PermissionDenied: _Row(403, "permission_error", "permission_denied"),
    NotFound: _Row(404, INVALID_REQUEST, "model_not_found"),
    AlreadyExists: _Row(409, INVALID_REQUEST, "request_id_in_use"),
    Overloaded: _Row(429, "rate_limit_error", "rate_limit_exceeded", retries=True),
    Unavailable: _Row(503, SERVER_ERROR, "unavailable", retries=True),
    # Nobody here cancels and then waits for the answer: the scheduler's side went away.
    Cancelled: _Row(503, SERVER_ERROR, "unavailable", retries=True),
    DeadlineExceeded: _Row(504, SERVER_ERROR, "deadline_exceeded"),
}
_OTHER = _Row(500, SERVER_ERROR, "internal_error")


def from_octavo(error: OctavoError, names: FieldNames) -> ApiError:
    """Translate what the SDK raised; `names` are those the caller gave its parameters."""
    if isinstance(error, InvalidArgument):
        return _from_invalid(error, names)
    if isinstance(error, Overloaded) and not error.reason and _TOO_LARGE in str(error):
        return ApiError(413, f"the request is too large: {error}", code="request_too_large")
    row = next((_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE), _OTHER)
    retry_after: float | None = getattr(error, "retry_after", None)
    if row.retries and retry_after is None:
        retry_after = RETRY_SECONDS
    headers = {"www-authenticate": "Bearer"} if row.status == 401 else None
    param = names.of("model") if row.status == 404 else None
    if isinstance(error, NeverFits):
        param = names.prompt
    return ApiError(
        row.status,
        str(error),
        kind=row.kind,
        param=param,
        code=row.code,
        retry_after=retry_after,
        headers=headers,
    )


def _from_invalid(error: InvalidArgument, names: FieldNames) -> ApiError:
    """Put the caller's name for the field in place of the wire's, in the message too."""
    if not error.field:
        return ApiError(400, str(error))
    param = names.of(error.field)
    message = str(error)
    if message.startswith(error.field):
        message = param + message[len(error.field) :]
    # The scheduler has no constant for this, and clients that shorten prompts look for one.
    is_length = param in (names.prompt, names.of("stopping.max_tokens"))
    is_context = is_length and "the context" in message
    return ApiError(
        400, message, param=param, code="context_length_exceeded" if is_context else None
    )


@contextmanager
def translated(names: FieldNames) -> Iterator[None]:
    """Let what the SDK raises inside the block leave it as an ApiError."""
    try:
        yield
    except OctavoError as error:
        raise from_octavo(error, names) from error
