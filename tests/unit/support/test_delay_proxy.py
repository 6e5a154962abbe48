"""The delay proxy: every byte, in order, not before its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.support.delay_proxy import DelayProxy

WAIT = 20.0


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    """A server that sends everything back, and its own end after the client's."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    yield f"{host}:{port}"
    server.close()


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.split(":")
    return await asyncio.open_connection(host, int(port))


async def test_an_answer_takes_both_delays(echo: str) -> None:
    """Never less; how much more is the machine's affair."""
    async with DelayProxy(echo, delay_seconds=0.03) as proxy:
        reader, writer = await connect(proxy.address)
        begin = time.perf_counter()
        writer.write(b"ping")
        assert await asyncio.wait_for(reader.readexactly(4), WAIT) == b"ping"
        assert time.perf_counter() - begin >= 0.06
        assert proxy.num_bytes == 8
        writer.close()


async def test_bytes_keep_their_order_and_do_not_wait_for_each_other(echo: str) -> None:
    """A hundred messages, sent one by one, arrive in the time of a few delays."""
    async with DelayProxy(echo, delay_seconds=0.2) as proxy:
        reader, writer = await connect(proxy.address)
        sent = [f"message {number:03d};".encode() for number in range(100)]
        begin = time.perf_counter()
        for message in sent:
            writer.write(message)
            await asyncio.sleep(0)
        received = await asyncio.wait_for(reader.readexactly(sum(map(len, sent))), WAIT)
        assert received == b"".join(sent)
        assert time.perf_counter() - begin < 100 * 0.2
        writer.close()


async def test_large_transfers_come_through_whole(echo: str) -> None:
    """Many chunks, both ways at once."""
    data = bytes(range(256)) * 16_384
    async with DelayProxy(echo, delay_seconds=0.01) as proxy:
        reader, writer = await connect(proxy.address)
        writer.write(data)
        assert await asyncio.wait_for(reader.readexactly(len(data)), WAIT) == data
        writer.close()


async def test_an_end_is_forwarded(echo: str) -> None:
    """What was sent before it still comes, then the other side's end."""
    async with DelayProxy(echo, delay_seconds=0.01) as proxy:
        reader, writer = await connect(proxy.address)
        writer.write(b"last words")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), WAIT) == b"last words"
        writer.close()


async def test_a_target_that_does_not_listen_ends_the_connection() -> None:
    """As a refused connection would."""
    unused = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    host, port = unused.sockets[0].getsockname()
    unused.close()
    async with DelayProxy(f"{host}:{port}", delay_seconds=0.0) as proxy:
        reader, writer = await connect(proxy.address)
        assert await asyncio.wait_for(reader.read(), WAIT) == b""
        writer.close()
