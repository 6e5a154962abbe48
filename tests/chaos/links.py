"""A network link that can be broken: a TCP proxy whose bytes can be held back, delayed or lost.

A cut keeps connections and holds bytes back, as TCP itself does when packets vanish: neither
end is told anything, and what was sent arrives once the link is whole again. A reset ends every
connection on both sides at once (RST). A link that refuses has nobody listening.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from dataclasses import dataclass, field
from enum import StrEnum

_CHUNK_BYTES = 1 << 16
_MAX_CHUNKS = 64  # held by one way of one connection; then the sender has to wait
_NO_LINGER = struct.pack("ii", 1, 0)
# Below the ports that outgoing connections take: a service that is down keeps its place.
_PORTS = range(15_000, 32_000)


class Way(StrEnum):
    """Which bytes a cut holds back."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


def free_address() -> str:
    """An address of this machine that nothing listens on, and no outgoing connection takes."""
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"
    raise OSError("no port is free")


@dataclass(eq=False)
class _Connection:
    """Two sockets and the tasks between them."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter | None = None
    task: asyncio.Task[None] = field(init=False)

    def abort(self) -> None:
        """End it with a reset on both sides."""
        for writer in (self.near, self.far):
            if writer is not None:
                with contextlib.suppress(OSError):
                    found = writer.get_extra_info("socket")
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                writer.transport.abort()
        self.task.cancel()


class Link:
    """Forwards the connections to one address.

    Attributes:
        name: what it connects, such as "scheduler-0>executor-1".
        address: HOST:PORT to connect to.
    """

    def __init__(self, name: str, target: str) -> None:
        """Prepare; `start` listens.

        Args:
            name: for people.
            target: HOST:PORT, listening or not.
        """
        self.name = name
        self.address = free_address()
        self._target = target
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._ways = {way: asyncio.Event() for way in (Way.FORWARD, Way.BACKWARD)}
        self._delay_seconds = 0.0
        self.restore()

    @property
    def num_connections(self) -> int:
        """Connections that are open now."""
        return len(self._connections)

    async def start(self) -> None:
        """Listen; harmless when it does."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, *_split(self.address))

    async def close(self) -> None:
        """End everything."""
        self.stop_listening()
        self.reset()
        tasks = [connection.task for connection in self._connections]
        await asyncio.gather(*tasks, return_exceptions=True)

    def cut(self, way: Way) -> None:
        """Hold bytes back from now on; a new connection needs both ways."""
        for each, is_open in self._ways.items():
            if way in (each, Way.BOTH):
                is_open.clear()

    def delay(self, seconds: float) -> None:
        """Let every byte that is sent from now on take so long, each way."""
        self._delay_seconds = seconds

    def restore(self) -> None:
        """Let bytes pass at once, those that were held back first."""
        self._delay_seconds = 0.0
        for is_open in self._ways.values():
            is_open.set()

    def reset(self) -> None:
        """End every connection with a reset."""
        for connection in list(self._connections):
            connection.abort()

    def stop_listening(self) -> None:
        """Refuse new connections until `start`."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(writer)
        connection.task = asyncio.create_task(self._forward(connection, reader))
        self._connections.add(connection)
        connection.task.add_done_callback(lambda _: self._connections.discard(connection))

    async def _forward(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        for is_open in self._ways.values():
            await is_open.wait()
        try:
            far_reader, connection.far = await asyncio.open_connection(*_split(self._target))
        except OSError:  # nobody is there: as a refused connection, as far as one can
            connection.abort()
            return
        try:
            await asyncio.gather(
                self._pump(Way.FORWARD, reader, connection.far),
                self._pump(Way.BACKWARD, far_reader, connection.near),
            )
            for writer in (connection.near, connection.far):
                writer.close()
        except OSError:  # either end was reset
            connection.abort()

    async def _pump(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward one way until its end; b"" stands for the end.

        Raises: OSError: if the connection was reset, once that has come through.
        """
        waiting: asyncio.Queue[tuple[float, bytes | OSError]] = asyncio.Queue(_MAX_CHUNKS)
        clock = asyncio.get_running_loop().time

        async def send() -> None:
            data: bytes | OSError = b"begin"
            while data:
                due, data = await waiting.get()
                if (early := due - clock()) > 0:
                    await asyncio.sleep(early)
                await self._ways[way].wait()
                if isinstance(data, OSError):
                    raise data
                writer.write(data)
                await writer.drain()
            with contextlib.suppress(OSError):
                writer.write_eof()

        async def receive() -> None:
            data: bytes | OSError = b"begin"
            while data and not isinstance(data, OSError):
                try:
                    data = await reader.read(_CHUNK_BYTES)
                except OSError as error:
                    data = error
                await waiting.put((clock() + self._delay_seconds, data))

        receiving = asyncio.create_task(receive())
        try:
            await send()
        finally:
            receiving.cancel()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
