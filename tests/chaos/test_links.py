"""The links that the chaos tests break: nothing is lost in a cut, all is lost in a reset."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.chaos.links import Link, Way

WAIT = 20.0
SOON = 0.2


@pytest.fixture
async def link() -> AsyncIterator[Link]:
    """A link to a server that sends everything back."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    found = Link("test>echo", f"{host}:{port}")
    await found.start()
    yield found
    await found.close()
    server.close()


async def connect(link: Link) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = link.address.split(":")
    return await asyncio.open_connection(host, int(port))


async def is_silent(reader: asyncio.StreamReader) -> bool:
    try:
        await asyncio.wait_for(reader.readexactly(1), SOON)
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("way", list(Way))
async def test_a_cut_holds_bytes_back_until_it_is_mended(link: Link, way: Way) -> None:
    """In either direction an answer does not come; once whole again it does, in order."""
    reader, writer = await connect(link)
    writer.write(b"before")
    assert await asyncio.wait_for(reader.readexactly(6), WAIT) == b"before"
    link.cut(way)
    writer.write(b"while it is cut, ")
    assert await is_silent(reader)
    link.restore()
    writer.write(b"after")
    expected = b"while it is cut, after"
    assert await asyncio.wait_for(reader.readexactly(len(expected)), WAIT) == expected
    writer.close()


async def test_a_cut_of_one_way_lets_the_other_pass(link: Link) -> None:
    """What was sent before, and answered in the cut, is held on its way back only."""
    reader, writer = await connect(link)
    link.cut(Way.BACKWARD)
    writer.write(b"ping")
    assert await is_silent(reader)
    writer.write_eof()  # reaches the server, whose own end is held back too
    assert await is_silent(reader)
    link.restore()
    assert await asyncio.wait_for(reader.read(), WAIT) == b"ping"


async def test_no_connection_is_made_through_a_cut(link: Link) -> None:
    """It hangs, and is made once the link is whole."""
    link.cut(Way.FORWARD)
    reader, writer = await connect(link)
    writer.write(b"ping")
    assert await is_silent(reader)
    link.restore()
    assert await asyncio.wait_for(reader.readexactly(4), WAIT) == b"ping"
    writer.close()


async def test_a_reset_ends_every_connection_with_an_error(link: Link) -> None:
    """Not with an end of stream, which would look orderly; new ones are forwarded."""
    reader, writer = await connect(link)
    writer.write(b"ping")
    await asyncio.wait_for(reader.readexactly(4), WAIT)
    link.reset()
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(1), WAIT)
    again, writer = await connect(link)
    writer.write(b"pong")
    assert await asyncio.wait_for(again.readexactly(4), WAIT) == b"pong"
    writer.close()


async def test_a_link_that_refuses_comes_back_on_its_port(link: Link) -> None:
    """As a service does that is restarted."""
    link.stop_listening()
    with pytest.raises(ConnectionRefusedError):
        await connect(link)
    await link.start()
    _, writer = await connect(link)
    writer.close()


async def test_a_target_that_is_down_resets(link: Link) -> None:
    """Whoever connects through the link hears of it."""
    nobody = Link("test>nobody", "127.0.0.1:1")
    await nobody.start()
    reader, _ = await connect(nobody)
    with pytest.raises(ConnectionResetError):
        await asyncio.wait_for(reader.read(1), WAIT)
    await nobody.close()


async def test_a_delay_is_added_each_way(link: Link) -> None:
    """Never less than asked for."""
    link.delay(0.1)
    reader, writer = await connect(link)
    begin = time.perf_counter()
    writer.write(b"ping")
    await asyncio.wait_for(reader.readexactly(4), WAIT)
    assert time.perf_counter() - begin >= 0.2
    writer.close()
