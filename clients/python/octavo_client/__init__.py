"""Octavo's Python client and command.

    from octavo_client import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_tokens=32).text)

Names load on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo_client._async_client import AsyncClient
    from octavo_client._async_stream import AsyncStream
    from octavo_client._channel import Address, parse_target
    from octavo_client._client import Client, Stream
    from octavo_client._retry import NO_RETRIES, RetryPolicy
    from octavo_client._state import (
        Blocks,
        Counters,
        EventKind,
        Executor,
        Explanation,
        Latency,
        Pool,
        RequestEvent,
        SequenceInfo,
        Snapshot,
        StepSample,
    )
    from octavo_client._story import Phase, Span, has_ended, spans_of
    from octavo_client._types import (
        Beam,
        Choice,
        Completion,
        Delta,
        Event,
        Finished,
        FinishReason,
        GenerateParams,
        Health,
        Message,
        Model,
        PositionLogprobs,
        Started,
        TokenLogprob,
        Usage,
    )
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

__all__ = [
    "NO_RETRIES",
    "Address",
    "AlreadyExists",
    "AsyncClient",
    "AsyncStream",
    "Beam",
    "Blocks",
    "Cancelled",
    "Choice",
    "Client",
    "Completion",
    "ConnectionFailed",
    "Counters",
    "DeadlineExceeded",
    "Delta",
    "Event",
    "EventKind",
    "Executor",
    "Explanation",
    "FinishReason",
    "Finished",
    "GenerateParams",
    "Health",
    "Internal",
    "InvalidArgument",
    "Latency",
    "Message",
    "Model",
    "NeverFits",
    "NotFound",
    "OctavoError",
    "Overloaded",
    "PermissionDenied",
    "Phase",
    "Pool",
    "PositionLogprobs",
    "RequestEvent",
    "RetryPolicy",
    "SequenceInfo",
    "Snapshot",
    "Span",
    "Started",
    "StepSample",
    "Stream",
    "TlsFailed",
    "TokenLogprob",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "has_ended",
    "parse_target",
    "spans_of",
]

_HOMES = {
    "Address": "_channel",
    "AsyncClient": "_async_client",
    "AsyncStream": "_async_stream",
    "Client": "_client",
    "Stream": "_client",
    "NO_RETRIES": "_retry",
    "parse_target": "_channel",
    "RetryPolicy": "_retry",
}
_MODULES = ("_types", "_state", "_story", "errors")


def __getattr__(name: str) -> Any:
    if name in __all__:
        homes = (_HOMES[name],) if name in _HOMES else _MODULES
        for home in homes:
            module = importlib.import_module(f"octavo_client.{home}")
            if hasattr(module, name):
                value = getattr(module, name)
                globals()[name] = value
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
