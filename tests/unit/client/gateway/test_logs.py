"""Tests of what the gateway's log says of a request."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
from structlog.testing import capture_logs


async def test_the_log_says_why_an_answer_failed(
    http: httpx.AsyncClient, fake: Any, wire: Any
) -> None:
    """The cause, where the service failed; of a refusal its code only: it may quote a prompt."""
    fake.failures = [
        wire.Failure(grpc.StatusCode.UNAVAILABLE, "no executor", started=False),
        wire.Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", started=False),
        None,
    ]
    with capture_logs() as logs:
        for _ in range(3):
            await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    ends = [entry for entry in logs if entry["event"] == "request_finished"]
    assert [(end["status"], end.get("code"), end.get("error")) for end in ends] == [
        (503, "unavailable", "no executor"),
        (429, "rate_limit_exceeded", None),
        (200, None, None),
    ]
