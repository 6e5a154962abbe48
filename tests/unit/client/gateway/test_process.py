"""The gateway as a process of its own: how it drains, what it says, that it speaks TLS."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.support.certificates import Authority

Started = tuple[asyncio.subprocess.Process, str]


@asynccontextmanager
async def started(target: str, *flags: str) -> AsyncIterator[Started]:
    """A gateway, and its HOST:PORT; the port is in the first line of its log."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "octavo_gateway", "--listen", "127.0.0.1:0", "--target", target, *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        line = json.loads(await asyncio.wait_for(process.stderr.readline(), 60))
        assert line["event"] == "gateway_started"
        yield process, f"127.0.0.1:{line['port']}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def plain(address: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{address}", timeout=60, trust_env=False)


async def test_sigterm_drains(fake: Any) -> None:
    """A stream goes on to its end, new requests are refused, and the exit code is 0."""
    fake.delta_seconds = 0.02
    body = {"prompt": "a", "max_tokens": 1000, "stream": True}
    async with started(fake.target) as (process, address), plain(address) as http:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            first = await anext(lines)
            process.send_signal(signal.SIGTERM)
            while (await http.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
            refused = await http.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            fake.delta_seconds = 0.0  # all has been seen that only a stream in flight shows
            rest = [line async for line in lines if line]
        assert first.startswith("data: {")
        assert rest[-1] == "data: [DONE]"
        assert len(rest) == 1001  # 999 tokens more, the reason and [DONE]
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_stream_past_the_grace_is_told_so(fake: Any) -> None:
    """Its last event says that the gateway ends; the scheduler's call is cancelled."""
    fake.delta_seconds = 0.02
    body = {"prompt": "a", "max_tokens": 100_000, "stream": True}
    async with started(fake.target, "--grace-seconds", "0.2") as (process, address):
        async with (
            plain(address) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            *_, last = [line async for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert await asyncio.wait_for(process.wait(), 60) == 0
    assert await asyncio.to_thread(fake.cancelled.wait, 10)


async def test_a_scheduler_that_goes_away_is_a_pause(fake: Any, wire: Any) -> None:
    """Streams go on where they were, and requests without a token yet are asked again."""
    away = wire.Failure(grpc.StatusCode.UNAVAILABLE, after_deltas=2)
    fake.failures = [wire.Failure(grpc.StatusCode.UNAVAILABLE, started=False), away, away]
    body = {"prompt": "a", "max_tokens": 6, "stream": True}
    async with started(fake.target) as (_, address), plain(address) as http:
        lines = (await http.post("/v1/completions", json=body)).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "1 2 3 4 5 6 "
    assert lines[-2:] == ["data: [DONE]", ""]
    assert len(fake.requests) == 4


async def test_replicas_of_a_list_are_one_scheduler(fake: Any, other: Any, wire: Any) -> None:
    """One that refuses is passed over, and a stream that it broke goes on at the other."""
    fake.failures = [wire.Failure(grpc.StatusCode.UNAVAILABLE, started=False)] * 1000
    other.failures = [None, wire.Failure(grpc.StatusCode.UNAVAILABLE, after_deltas=2)]
    body = {"prompt": "a", "max_tokens": 4}
    async with (
        started(f"{fake.target},{other.target}") as (_, address),
        plain(address) as http,
    ):
        for _ in range(3):
            answer = await http.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == "1 2 3 4 "
    assert len(other.requests) == 4
    assert [choice.token_ids for choice in other.requests[2].resume] == [[1, 2]]


async def test_a_full_scheduler_is_told_at_once(fake: Any, wire: Any) -> None:
    """The caller decides whether to wait: the gateway does not ask again for it."""
    fake.failures = [
        wire.Failure(
            grpc.StatusCode.RESOURCE_EXHAUSTED, started=False, details=(wire.retry_info(30),)
        )
    ]
    async with started(fake.target) as (_, address), plain(address) as http:
        response = await http.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "30"
    assert len(fake.requests) == 1


async def test_a_scheduler_that_is_away_is_told_as_such() -> None:
    """503 with a delay; health says so too, and the gateway lives on."""
    async with started("127.0.0.1:1") as (_, address), plain(address) as http:
        for _ in range(2):
            assert (await http.get("/health")).status_code == 503
            response = await http.post("/v1/completions", json={"prompt": "a"})
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert response.json()["error"]["type"] == "server_error"


async def test_https(tmp_path: Path) -> None:
    """With a certificate the port speaks TLS, and nothing else."""
    authority = Authority()
    cert, key = authority.issue().write(tmp_path)
    flags = ("--tls-cert", str(cert), "--tls-key", str(key))
    context = ssl.create_default_context(cadata=authority.pem.decode())
    async with (
        started("127.0.0.1:1", *flags) as (_, address),
        httpx.AsyncClient(verify=context, trust_env=False) as http,
    ):
        answer = await http.get(f"https://{address}/version")
        assert set(answer.json()) == {"version"}
        with pytest.raises(httpx.HTTPError):
            await http.get(f"http://{address}/version")
