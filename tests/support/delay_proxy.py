"""A TCP proxy that adds a fixed delay each way: a slow network on one machine.

    python -P tests/support/delay_proxy.py --target HOST:PORT --delay-ms 2

Bytes keep their order, and none waits for another: throughput has no limit. Ends of
streams are delayed like bytes. A delay is never shorter than asked for; timers of event
loops tick in milliseconds, so it may be up to 1 ms longer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 1 << 16


class DelayProxy:
    """Forwards every connection to one target, late.

    Attributes:
        address: HOST:PORT to connect to, once entered.
        num_bytes: forwarded so far, both ways.
    """

    def __init__(self, target: str, *, delay_seconds: float, listen: str = "127.0.0.1:0") -> None:
        """Prepare; entering listens.

        Args:
            target: HOST:PORT.
            delay_seconds: added each way.
            listen: HOST:PORT; port 0 takes a free one.
        """
        self._target = _split(target)
        self._listen = _split(listen)
        self._delay_seconds = delay_seconds
        self._connections: set[asyncio.Task[None]] = set()
        self.address = ""
        self.num_bytes = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, *self._listen)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def cut(self) -> None:
        """Break every connection there is, as a dying network does; new ones are forwarded."""
        for connection in self._connections:
            connection.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._forward(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            with contextlib.closing(far_writer):
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(self._pump(reader, far_writer))
                    ways.create_task(self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one way until its end; b"" stands for the end."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        clock = asyncio.get_running_loop().time

        async def send() -> None:
            data = b"begin"
            while data:
                due, data = await waiting.get()
                while (early := due - clock()) > 0:
                    await asyncio.sleep(early)
                self.num_bytes += len(data)
                writer.write(data)
            with contextlib.suppress(OSError):
                writer.write_eof()

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            data = b"begin"
            while data:
                try:
                    data = await reader.read(_CHUNK_BYTES)
                except ConnectionError:  # reset: as good as an end
                    data = b""
                waiting.put_nowait((clock() + self._delay_seconds, data))


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


async def _serve(target: str, listen: str, delay_seconds: float) -> None:
    async with DelayProxy(target, delay_seconds=delay_seconds, listen=listen) as proxy:
        sys.stdout.write(f"{proxy.address}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def main(argv: list[str] | None = None) -> None:
    """Run until interrupted; the first line of output is the address to connect to."""
    parser = argparse.ArgumentParser(description="Forward TCP connections with a delay each way.")
    parser.add_argument("--target", required=True, metavar="HOST:PORT", help="where to")
    parser.add_argument(
        "--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="[127.0.0.1, a free port]"
    )
    parser.add_argument("--delay-ms", type=float, default=2.0, metavar="MS", help="each way [2]")
    options = parser.parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options.target, options.listen, options.delay_ms / 1000))


if __name__ == "__main__":
    main()
