"""Tests of octavo_gateway.certificate with real connections."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from octavo_gateway.certificate import Certificate
from octavo_gateway.errors import StartupError

from tests.support.certificates import Authority

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Served:
    """An echo over TLS whose certificate is kept current."""

    def __init__(self, port: int, authority: Authority) -> None:
        self._port = port
        self._context = ssl.create_default_context(cadata=authority.pem.decode())

    async def connect(self) -> Connection:
        return await asyncio.open_connection("127.0.0.1", self._port, ssl=self._context)

    async def serial(self) -> str:
        """Connect anew, and tell which certificate was shown."""
        _, writer = await self.connect()
        certificate = writer.get_extra_info("peercert")
        writer.close()
        with contextlib.suppress(ssl.SSLError):
            await writer.wait_closed()
        return str(certificate["serialNumber"])


@contextlib.asynccontextmanager
async def serving(authority: Authority, files: tuple[Path, Path]) -> AsyncIterator[Served]:
    certificate = Certificate(*files, poll_seconds=0.01)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context)
    current = asyncio.create_task(certificate.keep_current(context))
    try:
        yield Served(server.sockets[0].getsockname()[1], authority)
    finally:
        current.cancel()
        server.close()


async def test_new_connections_see_a_new_certificate(tmp_path: Path) -> None:
    """Without a restart; one that is open goes on."""
    authority = Authority()
    files = authority.issue().write(tmp_path)
    async with serving(authority, files) as served:
        reader, writer = await served.connect()
        first = await served.serial()
        authority.issue().write(tmp_path)
        while await served.serial() == first:
            await asyncio.sleep(0.01)
        writer.write(b"still here\n")
        assert await reader.readline() == b"still here\n"
        writer.close()


async def test_a_broken_pair_leaves_the_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong with it; and the next good one is taken."""
    authority = Authority()
    files = authority.issue().write(tmp_path)
    async with serving(authority, files) as served:
        first = await served.serial()
        other = authority.issue()
        breaks = (
            lambda: files[1].write_bytes(other.key),  # its certificate has not come yet
            lambda: files[0].write_bytes(b"garbage"),
            files[0].unlink,
        )
        for break_it in breaks:
            caplog.clear()
            break_it()
            while not caplog.records:
                await asyncio.sleep(0.01)
            assert {each.message for each in caplog.records} == {"files_refused"}
            assert await served.serial() == first
        other.write(tmp_path)
        while await served.serial() == first:
            await asyncio.sleep(0.01)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """Before anything listens, naming the flag."""
    authority = Authority()
    cert, _ = authority.issue().write(tmp_path, "one")
    _, key = authority.issue().write(tmp_path, "two")
    pairs = (
        (cert, key, "--tls-key"),
        (cert, tmp_path / "missing", "--tls-key"),
        (key, cert, "--tls-cert"),
    )
    for one, two, flag in pairs:
        with pytest.raises(StartupError, match=f"^{flag}: ") as caught:
            Certificate(one, two)
        assert "\n" not in str(caught.value)
