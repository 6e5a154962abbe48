"""The story of one request, for the console's page: its events, and where its time went."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from octavo_client import AsyncClient, Explanation, NotFound, has_ended, spans_of

from octavo_gateway.errors import ApiError, invalid, translated
from octavo_gateway.names import FieldNames

_MAX_ID_CHARACTERS = 1024
_SECONDS = 10.0
_NS_PER_MS = 1e6
_NAMES = FieldNames()


async def story(client: AsyncClient, request_id: str | None, api_key: str | None) -> dict[str, Any]:
    """Give what the scheduler knows of a request; times are milliseconds since its first event.

    Raises:
        ApiError: 400 without an id, 404 for one that is not known, and for what the scheduler
            refuses.
    """
    if not request_id or len(request_id) > _MAX_ID_CHARACTERS:
        raise invalid("request_id", f"must be an id of 1 to {_MAX_ID_CHARACTERS} characters")
    try:
        with translated(_NAMES):
            explanation = await client.explain(request_id, timeout=_SECONDS, api_key=api_key)
    except ApiError as error:
        if not isinstance(error.__cause__, NotFound):
            raise
        raise ApiError(
            404, str(error), param="request_id", code="request_not_found"
        ) from error.__cause__
    return _as_json(explanation, time.time_ns())


def _as_json(explanation: Explanation, now_unix_ns: int) -> dict[str, Any]:
    events = explanation.events
    begin = events[0].time_unix_ns if events else 0

    def since(time_unix_ns: int) -> float:
        return (time_unix_ns - begin) / _NS_PER_MS

    told = asdict(explanation)
    for event in told["events"]:
        event["at_ms"] = since(event.pop("time_unix_ns"))
    told["has_ended"] = has_ended(events)
    told["spans"] = [
        {
            "phase": span.phase,
            "begin_ms": since(span.begin_unix_ns),
            "end_ms": since(span.end_unix_ns),
        }
        for span in spans_of(events, now_unix_ns)
    ]
    return told
