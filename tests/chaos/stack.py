"""Executors, schedulers and a gateway as real processes, with a breakable link between any two.

clients ──> scheduler-0 ──> executor-0        every arrow is a Link
   │    └─> scheduler-1 ──> executor-1        (each scheduler has one to each executor)
   └──────> gateway ──> both schedulers
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from octavo_client import NO_RETRIES, AsyncClient, Executor
from octavo_client.errors import OctavoError

from tests.chaos.links import Link, free_address
from tests.chaos.processes import Service, is_answering, is_http_answering, is_serving

_POLL_SECONDS = 0.2
_SNAPSHOT_SECONDS = 2.0


@dataclass(frozen=True)
class Layout:
    """What to start.

    Attributes:
        model: folder of the model.
        folder: of the logs.
        num_executors, num_schedulers: how many of each.
        has_gateway: whether there is a gateway in front of the schedulers.
        num_blocks, num_host_blocks: of each executor's pool.
        executor_module: to run instead of the service's own.
        executor_flags, scheduler_flags, gateway_flags: further ones.
        restart_seconds: from the end of a process to its next start.
    """

    model: Path
    folder: Path
    num_executors: int = 2
    num_schedulers: int = 2
    has_gateway: bool = True
    num_blocks: int = 192
    num_host_blocks: int = 64
    executor_module: str = "executor_svc"
    executor_flags: tuple[str, ...] = ()
    scheduler_flags: tuple[str, ...] = ()
    gateway_flags: tuple[str, ...] = ()
    restart_seconds: float = 0.5


class Stack:
    """Everything that runs; entered, it serves.

    Attributes:
        executors, schedulers, gateways: the services, the last none or one.
        links: by name, as in "scheduler-0>executor-1", "clients>scheduler-0".
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.links: dict[str, Link] = {}
        self.executors = [
            self._service(f"executor-{number}", layout.executor_module)
            for number in range(layout.num_executors)
        ]
        self.schedulers = [
            self._service(f"scheduler-{number}", "scheduler_svc")
            for number in range(layout.num_schedulers)
        ]
        self.gateways = [self._service("gateway", "octavo_gateway")] if layout.has_gateway else []
        for near, far in itertools.product(self.schedulers, self.executors):
            self._link(near.name, far)
        for far in (*self.schedulers, *self.gateways):
            self._link("clients", far)
        for near, far in itertools.product(self.gateways, self.schedulers):
            self._link(near.name, far)

    @property
    def services(self) -> list[Service]:
        """All of them."""
        return [*self.executors, *self.schedulers, *self.gateways]

    @property
    def target(self) -> str:
        """Where the SDK finds the schedulers."""
        return self._addresses("clients", self.schedulers)

    @property
    def http_url(self) -> str:
        """Where HTTP clients find the gateway."""
        return f"http://{self.links['clients>gateway'].address}"

    @property
    def unasked_ends(self) -> list[str]:
        """Processes that ended of themselves."""
        return [end for service in self.services for end in service.unasked_ends]

    async def __aenter__(self) -> Self:
        try:
            for link in self.links.values():
                await link.start()
            for service in self.services:
                await service.start()
            for service in self.services:
                await service.wait_started()
            await self.until_owned()
        except BaseException:
            await self._leave()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._leave()

    async def held_by(self, scheduler: Service) -> list[Executor]:
        """The executors whose claim a scheduler holds, past every link; none if it is silent."""
        direct = AsyncClient(
            f"grpc://{scheduler.address}", retry=NO_RETRIES, unary_timeout=_SNAPSHOT_SECONDS
        )
        async with direct as client:
            try:
                shown = (await client.snapshot(sequences=True)).executors
            except OctavoError:
                return []
        return [executor for executor in shown if executor.connected]

    async def held(self) -> dict[str, list[Executor]]:
        """For each scheduler's name what it holds."""
        found = await asyncio.gather(*(self.held_by(each) for each in self.schedulers))
        return {each.name: held for each, held in zip(self.schedulers, found, strict=True)}

    async def until_owned(self, seconds: float = 90.0) -> None:
        """Wait until every executor has its scheduler.

        Raises: TimeoutError: with what is held, if that takes longer.
        """
        give_up = time.monotonic() + seconds
        while sum(map(len, (held := await self.held()).values())) < len(self.executors):
            if time.monotonic() > give_up:
                shown = {name: [each.address for each in some] for name, some in held.items()}
                raise TimeoutError(f"an executor has no scheduler after {seconds:g} s: {shown}")
            await asyncio.sleep(_POLL_SECONDS)

    async def requests_on(self, executor: Service) -> set[str]:
        """Ids of the requests that an executor computes for, as the schedulers see it."""
        found: set[str] = set()
        for name, held in (await self.held()).items():
            address = self.links[f"{name}>{executor.name}"].address
            for each in held:
                if each.address == address:
                    found |= {sequence.request_id for sequence in each.sequences}
        return found

    def restore_links(self) -> None:
        """Make every link whole."""
        for link in self.links.values():
            link.restore()

    def _service(self, name: str, module: str) -> Service:
        kind = name.partition("-")[0]
        address = free_address()
        flags = {
            "executor": self._executor_flags,
            "scheduler": self._scheduler_flags,
            "gateway": self._gateway_flags,
        }[kind]
        probe = {
            "executor": is_serving,
            "scheduler": is_answering,
            "gateway": is_http_answering,
        }[kind]
        return Service(
            name,
            module,
            lambda incarnation: ["--listen", address, *flags(name, incarnation)],
            address=address,
            probe=probe,
            folder=self.layout.folder,
            restart_seconds=self.layout.restart_seconds,
        )

    def _link(self, near: str, far: Service) -> None:
        name = f"{near}>{far.name}"
        self.links[name] = Link(name, far.address)

    def _addresses(self, near: str, far: Sequence[Service]) -> str:
        return ",".join(self.links[f"{near}>{each.name}"].address for each in far)

    def _executor_flags(self, name: str, incarnation: int) -> list[str]:
        layout = self.layout
        flags = ["--model", str(layout.model), "--dtype", "float32", "--kv-check"]
        flags += ["--num-blocks", str(layout.num_blocks), "--num-threads", "1"]
        flags += ["--num-host-blocks", str(layout.num_host_blocks)]
        return [*flags, *layout.executor_flags]

    def _scheduler_flags(self, name: str, incarnation: int) -> list[str]:
        flags = ["--model", str(self.layout.model), "--scheduler-id", f"{name}.{incarnation}"]
        flags += ["--executors", self._addresses(name, self.executors)]
        return [*flags, *self.layout.scheduler_flags]

    def _gateway_flags(self, name: str, incarnation: int) -> list[str]:
        return ["--target", self._addresses(name, self.schedulers), *self.layout.gateway_flags]

    async def _leave(self) -> None:
        """End from the outside in, so that nothing waits for what is gone."""
        self.restore_links()
        for services in (self.gateways, self.schedulers, self.executors):
            await asyncio.gather(*(service.stop() for service in services))
        for link in self.links.values():
            await link.close()
