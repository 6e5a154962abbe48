"""The console over the running services: its page, and what its watch shows of real blocks."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from octavo_client import AsyncClient

from tests.e2e.conftest import Served
from tests.e2e.waiting import until_free

pytestmark = pytest.mark.asyncio(loop_scope="session")

MAX_WATCHERS = 8  # the gateway's default
PROMPT = "The keeper of the lighthouse wrote down everything that the sea brought: " * 3
NUM_CHOICES = 4


@pytest.fixture
def url(served: Served) -> str:
    """Of the gateway."""
    return served[1].http_url


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """The lines of one watch, as they come."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http,
        http.stream("GET", "/console/watch", params={"interval_ms": 100}) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/x-ndjson"
        yield (json.loads(line) async for line in response.aiter_lines())


async def test_the_page_is_served(url: str) -> None:
    """To anybody who reaches the gateway; it is the same for all, and has no data."""
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http:
        page = await http.get("/console")
        assert page.status_code == 200
        assert 'src="console/app.js"' in page.text
        script = await http.get("/console/app.js")
        assert script.headers["content-type"].startswith("text/javascript")


async def test_four_choices_of_a_prompt_share_its_blocks(url: str, client: AsyncClient) -> None:
    """The tables of all four begin with the same blocks, whose counts say 4; then they differ."""
    prompt_tokens = len(await client.tokenize(PROMPT))
    async with watching(url) as frames:
        asking = asyncio.create_task(
            client.generate(
                PROMPT, n=NUM_CHOICES, max_tokens=200, temperature=1.0, seed=5, ignore_eos=True,
                request_id="console-4",
            )
        )  # fmt: skip
        kinds = counts = b""
        async with asyncio.timeout(60):
            async for frame in frames:
                (executor,) = frame["executors"]
                kinds = base64.b64decode(executor.get("kinds", "")) or kinds
                counts = base64.b64decode(executor.get("ref_counts", "")) or counts
                tables = tables_of(executor, "console-4")
                if len(tables) == NUM_CHOICES and min(map(len, tables)) > prompt_tokens // 16 + 1:
                    break
        size = executor["pool"]["block_size"]
        full = prompt_tokens // size
        assert full >= 2
        assert len({tuple(table[:full]) for table in tables}) == 1
        assert {counts[block] for block in tables[0][:full]} == {NUM_CHOICES}
        own = [set(table[full:]) for table in tables]
        assert len(set.union(*own)) == sum(map(len, own)), "what they wrote is their own"
        assert {counts[block] for block in set.union(*own)} == {1}
        assert {kinds[block] for table in tables for block in table} == {2}
        assert len(kinds) == len(counts) == executor["pool"]["num_total"]
        assert PROMPT[:20] not in json.dumps(frame)
        await asking
    await until_free(client)


def tables_of(executor: dict[str, Any], request_id: str) -> list[list[int]]:
    """Read the block tables of one request's sequences."""
    packed = memoryview(base64.b64decode(executor["tables"])).cast("I")
    tables, begin = [], 0
    for sequence in executor["sequences"]:
        end = begin + sequence["num_blocks"]
        if sequence["request_id"] == request_id:
            tables.append(list(packed[begin:end]))
        begin = end
    assert begin == len(packed)
    return tables


async def test_steps_and_copies_of_a_request_are_told(url: str, client: AsyncClient) -> None:
    """Phases that took time, a step for each token, and the block that was copied on write."""
    prompt = [*await client.tokenize(PROMPT)][: 16 + 5]  # the last block is partly full: it splits
    async with watching(url) as frames:
        await anext(frames)
        before = (await client.snapshot()).executors[0].counters
        await client.generate(
            tokens=prompt, n=2, max_tokens=12, temperature=1.0, seed=1, ignore_eos=True
        )
        after = (await client.snapshot()).executors[0].counters
        steps: dict[int, Any] = {}
        async with asyncio.timeout(30):
            async for frame in frames:
                steps |= {step["step_id"]: step for step in frame["executors"][0]["steps"]}
                if sum(step["num_sampled"] for step in steps.values()) >= 24:
                    break
    assert sum(len(step["copied_blocks"]) for step in steps.values()) == (
        after.num_copied_blocks - before.num_copied_blocks
    )
    assert any(step["copied_blocks"] for step in steps.values())
    for step in steps.values():
        assert step["forward_ns"] > 0
        assert all(step[f"{name}_ns"] >= 0 for name in ("plan", "wire", "queue", "sample"))
    assert frame["latency"]["num_later_tokens"] > 0
    await until_free(client)


async def test_watchers_are_bounded_and_their_places_come_back(url: str) -> None:
    """The ninth is refused with a reason; when one leaves there is room again."""
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        http = httpx.AsyncClient(base_url=url, timeout=30, trust_env=False)
        await stack.enter_async_context(http)
        async with AsyncExitStack() as readers:
            watches = [
                await readers.enter_async_context(watching(url)) for _ in range(MAX_WATCHERS)
            ]
            for watch in watches:
                await anext(watch)
            async with http.stream("GET", "/console/watch") as refused:
                assert refused.status_code == 503
                error = json.loads(await refused.aread())["error"]
            assert error["code"] == "too_many_watchers"
            assert "--max-console-watchers" in error["message"]
        while True:
            async with http.stream("GET", "/console/watch") as answer:
                if answer.status_code == 200:
                    break
            await asyncio.sleep(0.05)


async def test_a_reader_that_does_not_read_holds_nobody_up(url: str, client: AsyncClient) -> None:
    """While it is stuck, requests run and another console sees them."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.sendall(b"GET /console/watch?interval_ms=100 HTTP/1.1\r\nHost: x\r\n\r\n")
        async with watching(url) as frames:
            answer = await client.generate(
                "Once", max_tokens=60, ignore_eos=True, request_id="beside-stuck"
            )
            assert len(answer.token_ids) == 60
            assert "executors" in await anext(frames)
    await until_free(client)
