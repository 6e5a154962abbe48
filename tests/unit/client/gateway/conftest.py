"""The gateway's application over the fake scheduler, without a network in front of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest_asyncio
from octavo_client import AsyncClient, RetryPolicy
from octavo_gateway.app import Gateway

RETRIES = RetryPolicy(max_attempts=1, resume_seconds=0.0, retries_overload=False)


@pytest_asyncio.fixture
async def gateway(fake: Any) -> AsyncIterator[Gateway]:
    """A gateway with small bounds."""
    async with AsyncClient(fake.target, retry=RETRIES, api_key="") as client:
        yield gateway_over(client)


def gateway_over(client: AsyncClient, *, timeout: float = 20.0) -> Gateway:
    """A gateway with small bounds over a client of one's own."""
    return Gateway(
        client,
        timeout=timeout,
        max_concurrent_requests=2,
        max_body_bytes=10_000,
        cors_origins=("https://page.example",),
    )


@pytest_asyncio.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    """A client of it."""
    transport = httpx.ASGITransport(app=gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


def events_of(response: httpx.Response) -> list[Any]:
    """The server-sent events of an answer: their JSON, and "[DONE]"."""
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    data = [frame.removeprefix("data: ") for frame in frames]
    return [each if each == "[DONE]" else json.loads(each) for each in data]
