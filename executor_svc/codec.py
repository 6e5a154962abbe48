"""Request bytes to messages, so that bad bytes are the client's error and not ours.

grpc answers UNKNOWN or INTERNAL and logs a traceback when a deserializer raises. So
these never raise: bytes that are no message become a `Malformed`, which the servicer
turns into INVALID_ARGUMENT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from executor_svc.errors import InvalidRequest

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Malformed:
    """What stands in for a message that could not be parsed."""

    kind: str
    num_bytes: int

    def __str__(self) -> str:
        """Say what was expected, for the client."""
        return f"the request's {self.num_bytes} bytes are not a well-formed {self.kind}"


def deserializer(kind: type[M]) -> Callable[[bytes], M | Malformed]:
    """Make a deserializer for one message type that never raises."""

    def parse(data: bytes) -> M | Malformed:
        try:
            return kind.FromString(data)
        except DecodeError:
            return Malformed(kind.__name__, len(data))

    return parse


def require_message(received: M | Malformed) -> M:
    """Give the message, or refuse bytes that are none.

    Raises:  InvalidRequest: with what was expected.
    """
    if isinstance(received, Malformed):
        raise InvalidRequest(str(received))
    return received
