"""Real processes of the services, and a supervisor that starts again what ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]  # published without types
from octavo_client import NO_RETRIES, AsyncClient, Health
from octavo_client._process import Child
from octavo_client.errors import OctavoError

_POLL_SECONDS = 0.1
_PROBE_SECONDS = 2.0
_EXIT_SECONDS = 10.0

Probe = Callable[[str], Awaitable[bool]]


class Service:
    """One service of a stack, over all the processes that it is in turn.

    A process that ends is started again on the same port, as an orchestrator does. An end
    that nobody asked for is noted.

    Attributes:
        name: such as "executor-0".
        address: HOST:PORT that every process listens on.
        incarnation: how many processes there have been.
        has_started: set while the process answers as `probe` asks.
        unasked_ends: one line for each process that ended of itself.
        last_exit: exit code of the process before.
        busy: held by whoever disturbs it, so that one fault at a time does.
    """

    def __init__(
        self,
        name: str,
        module: str,
        flags: Callable[[int], list[str]],
        *,
        address: str,
        probe: Probe,
        folder: Path,
        restart_seconds: float = 0.5,
    ) -> None:
        """Prepare; `start` starts.

        Args:
            name: for logs.
            module: to run with -m.
            flags: of the incarnation with this number, from 1.
            address: where it will listen.
            probe: says whether a process at an address has started.
            folder: of the logs.
            restart_seconds: between an end and the next start.
        """
        self.name = name
        self.address = address
        self.incarnation = 0
        self.has_started = asyncio.Event()
        self.unasked_ends: list[str] = []
        self.last_exit: int | None = None
        self.busy = asyncio.Lock()
        self._module = module
        self._flags = flags
        self._probe = probe
        self._folder = folder
        self._restart_seconds = restart_seconds
        self._child: Child | None = None
        self._is_asked = False
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Of the present process."""
        assert self._child is not None
        return self._child.pid

    @property
    def logs(self) -> list[Path]:
        """One a process, in order."""
        return [self._log(number) for number in range(1, self.incarnation + 1)]

    async def start(self) -> None:
        """Start the first process, and watch over it from now on."""
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End it for good: drained if it can be, else killed."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self._child is not None:
            self.resume()
            await self._child.stop(_EXIT_SECONDS)

    def kill(self) -> None:
        """End the process as kill -9 does."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask the process to drain and end."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """Stop the process in its tracks; its connections stay."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen process go on."""
        self._signal(signal.SIGCONT)

    async def wait_started(self, seconds: float = 60.0) -> None:
        """Wait until the present process has started.

        Raises: TimeoutError: naming the service, if that takes longer.
        """
        try:
            await asyncio.wait_for(self.has_started.wait(), seconds)
        except TimeoutError:
            ends = "; ".join(self.unasked_ends[-2:]) or "it has not ended"
            raise TimeoutError(f"{self.name} did not start within {seconds:g} s: {ends}") from None

    async def wait_next(self, incarnation: int, seconds: float = 90.0) -> None:
        """Wait until a process after that one has started."""
        give_up = time.monotonic() + seconds
        while self.incarnation <= incarnation:
            if time.monotonic() > give_up:
                raise TimeoutError(f"{self.name} did not end within {seconds:g} s")
            await asyncio.sleep(_POLL_SECONDS)
        await self.wait_started(seconds)

    def resources(self) -> tuple[int, int]:
        """Resident bytes and open files of the present process."""
        process = psutil.Process(self.pid)
        return process.memory_info().rss, process.num_fds()

    def _log(self, incarnation: int) -> Path:
        return self._folder / f"{self.name}-{incarnation}.log"

    def _end(self, number: signal.Signals) -> None:
        self._is_asked = True
        self.has_started.clear()
        self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        assert self._child is not None
        if not self._child.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    async def _spawn(self) -> None:
        self.incarnation += 1
        self._is_asked = False
        self._child = Child(self.name, self._log(self.incarnation), echo=False)
        await self._child.start(self._module, self._flags(self.incarnation))

    async def _keep(self) -> None:
        while True:
            assert self._child is not None
            starting = asyncio.create_task(self._await_start())
            try:
                self.last_exit = await self._child.wait()
            finally:
                starting.cancel()
            self.has_started.clear()
            if not self._is_asked:
                log = self._child.log.name
                self.unasked_ends.append(f"{self.name} ended with {self.last_exit} (log: {log})")
            await asyncio.sleep(self._restart_seconds)
            await self._spawn()

    async def _await_start(self) -> None:
        while not await self._probe(self.address):
            await asyncio.sleep(_POLL_SECONDS)
        self.has_started.set()


async def health_of(address: str) -> Health | None:
    """What a gRPC service says of itself; None: nothing answers."""
    plain = AsyncClient(f"grpc://{address}", retry=NO_RETRIES, unary_timeout=_PROBE_SECONDS)
    async with plain as client:
        try:
            return await client.health()
        except OctavoError:
            return None


async def is_serving(address: str) -> bool:
    """Whether a gRPC service is ready."""
    return await health_of(address) is Health.SERVING


async def is_answering(address: str) -> bool:
    """Whether a gRPC service answers at all: a standby is well, and does not serve."""
    return await health_of(address) is not None


async def is_http_answering(address: str) -> bool:
    """Whether an HTTP service answers at all."""
    async with httpx.AsyncClient(timeout=_PROBE_SECONDS, trust_env=False) as client:
        try:
            await client.get(f"http://{address}/health")
        except httpx.HTTPError:
            return False
        return True
