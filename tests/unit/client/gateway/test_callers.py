"""Tests of callers who hang up, do not read, are too many, or outlast the gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from octavo_client import AsyncClient
from octavo_gateway.app import Gateway

from tests.unit.client.gateway.conftest import RETRIES, gateway_over


class Caller:
    """One request by hand, for callers who hang up or do not read."""

    def __init__(self, gateway: Gateway, path: str, body: dict[str, Any]) -> None:
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.sent: list[dict[str, Any]] = []
        self.began = asyncio.Event()
        self._bodies = [json.dumps(body).encode()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("gateway", 80),
            "client": ("caller", 1),
        }
        self.task = asyncio.ensure_future(gateway.app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._bodies:
            return {"type": "http.request", "body": self._bodies.pop(), "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self.began.set()
        await self.reads.wait()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_hangs_up_cancels_its_call(
    gateway: Gateway, fake: Any, stream: bool
) -> None:
    """Whether it waits for the whole or reads along: the scheduler gets its blocks back."""
    fake.delta_seconds = 0.02
    body = {"prompt": "a", "max_tokens": 10_000, "stream": stream}
    caller = Caller(gateway, "/v1/completions", body)
    while not fake.requests:
        await asyncio.sleep(0.01)
    if stream:
        await caller.began.wait()
    caller.gone.set()
    await caller.task
    assert await asyncio.to_thread(fake.cancelled.wait, 10)
    assert gateway.gate.num_inside == 0
    assert b'status="499"} 1.0' in gateway.metrics.text()


async def test_too_many_requests_are_refused_while_they_last(
    gateway: Gateway, http: httpx.AsyncClient, fake: Any
) -> None:
    """The bound of the fixture is 2; the third is told when to come back."""
    fake.delta_seconds = 0.02
    body = {"prompt": "a", "max_tokens": 10_000, "stream": True}
    callers = [Caller(gateway, "/v1/completions", body) for _ in range(2)]
    await asyncio.gather(*(caller.began.wait() for caller in callers))
    refused = await http.post("/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert (await http.get("/health")).status_code == 200
    for caller in callers:
        caller.gone.set()
        await caller.task
    again = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 0})
    assert again.status_code == 200


async def test_a_caller_that_does_not_read_holds_back_its_own_stream(
    gateway: Gateway, fake: Any
) -> None:
    """Nothing piles up here: one message waits, and the rest stays with the scheduler."""
    caller = Caller(gateway, "/v1/completions", {"prompt": "a", "max_tokens": 200, "stream": True})
    caller.reads.clear()
    await caller.began.wait()
    await asyncio.sleep(0.2)
    assert len(caller.sent) == 1
    caller.reads.set()
    await caller.task
    assert caller.sent[-1]["body"] == b"data: [DONE]\n\n"
    assert len(caller.sent) == 203  # the head, 200 tokens, their end and [DONE]


@pytest.mark.parametrize("reads", [True, False])
async def test_a_request_that_takes_too_long_ends(fake: Any, reads: bool) -> None:
    """504 for a whole answer, an error as the last event of a stream; a caller that does not
    read is not waited for, and its call is cancelled all the same.
    """
    fake.delta_seconds = 0.02
    for stream in (False, True):
        fake.cancelled.clear()
        body = {"prompt": "a", "max_tokens": 10_000, "stream": stream}
        async with AsyncClient(fake.target, retry=RETRIES, api_key="") as client:
            gateway = gateway_over(client, timeout=0.1)
            caller = Caller(gateway, "/v1/completions", body)
            if stream and not reads:
                caller.reads.clear()
            await caller.task
        assert await asyncio.to_thread(fake.cancelled.wait, 10)
        assert b'status="504"' in gateway.metrics.text()
        if reads:
            sent = b"".join(message.get("body", b"") for message in caller.sent)
            assert b'"code":"deadline_exceeded"' in sent
            # A busy machine may not even have begun the stream.
            assert caller.sent[0]["status"] in ((200, 504) if stream else (504,))


async def test_the_end_of_the_gateway_is_the_last_event(gateway: Gateway, fake: Any) -> None:
    """A stream that outlasts the grace is told so, and its call is cancelled."""
    fake.delta_seconds = 0.02
    caller = Caller(
        gateway, "/v1/completions", {"prompt": "a", "max_tokens": 10_000, "stream": True}
    )
    await caller.began.wait()
    assert await gateway.gate.drain(0.05) == 1
    await caller.task
    event = json.loads(caller.sent[-2]["body"].removeprefix(b"data: "))
    assert event["error"]["code"] == "unavailable"
    assert not caller.sent[-1]["more_body"]
    assert await asyncio.to_thread(fake.cancelled.wait, 10)
