"""Both services, and the gateway if asked for, as children: started, watched, drained.

For one machine: `octavo serve`, `octavo demo` and tests. Placement and restarts in a
cluster belong to Kubernetes.

    async with LocalStack(LocalOptions(listen="127.0.0.1:0", model=folder)) as stack:
        async with AsyncClient(stack.target) as client: ...
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from octavo_client._process import Child, LocalError, run_to_last_line
from octavo_client._socket import connect_address, settle_address
from octavo_client._types import Health
from octavo_client.errors import OctavoError

_MODULES = {
    "executor": "executor_svc",
    "scheduler": "scheduler_svc",
    "gateway": "octavo_gateway",
}
_POLL_SECONDS = 0.05
_KILL_SECONDS = 5.0  # after a service's own grace, before it is killed
_ORPHAN_SECONDS = 2.0  # for a service whose other one died: nothing is left to drain


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What to start. None means: the service's own default.

    Attributes:
        model: what `octavo model fetch` understands; a model folder is used as it is.
        listen: HOST:PORT of the scheduler; port 0 picks a free one.
        executor_listen: HOST:PORT of the executor; None: loopback, a free port.
        http_listen: HOST:PORT of the gateway; None: no gateway.
        scheduler_args, executor_args: flags passed through as they are.
        insecure_bind: let all listen without TLS on addresses other than loopback.
        log_dir: folder of scheduler.log and so on; None: a temporary one, which is
            removed at the end if all went well.
        echo_logs: also print the services' lines on this process's stderr.
        start_seconds: how long all may take to be ready, without fetching the model.
        stop_seconds: how long each may take to drain, before it is killed.
    """

    model: str | None = None
    listen: str = "127.0.0.1:50051"
    executor_listen: str | None = None
    http_listen: str | None = None
    dtype: str | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    num_host_blocks: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_rows: int | None = None
    scheduler_args: tuple[str, ...] = ()
    executor_args: tuple[str, ...] = ()
    insecure_bind: bool = False
    log_dir: Path | None = None
    echo_logs: bool = False
    start_seconds: float = 180.0
    stop_seconds: float = 30.0


class LocalStack:
    """One scheduler and one executor that live as long as the `async with` block.

    Invariant: when the block is left, in whatever way, all processes have ended.

    Attributes:
        target: HOST:PORT for clients, once entered.
        http_url: root of the gateway's URLs, once entered; "" if there is none.
        log_dir: where the services' logs are, once entered.
        ready_seconds: how long it took to be ready, once entered.
    """

    def __init__(
        self, options: LocalOptions, *, on_wait: Callable[[str], None] = lambda _: None
    ) -> None:
        self._options = options
        self._on_wait = on_wait
        self._children: list[Child] = []
        self.target = ""
        self.http_url = ""
        self.log_dir = Path()
        self._temporary_logs: Path | None = None
        self._has_failed = False
        self._is_stopped = False
        self.ready_seconds = 0.0

    @property
    def keeps_logs(self) -> bool:
        """Whether temporary logs are still there; once left, only after a failure."""
        return self._temporary_logs is not None and self._temporary_logs.exists()

    async def __aenter__(self) -> Self:
        begin = time.monotonic()
        try:
            await self._start()
        except BaseException as error:
            await self._leave(error)
            raise
        self.ready_seconds = time.monotonic() - begin
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._leave(error)

    async def _leave(self, error: BaseException | None) -> None:
        """Stop; keep temporary logs only if they may tell why something failed."""
        self._has_failed |= isinstance(error, Exception)
        try:
            await self._stop_surely()
        finally:
            if self._temporary_logs is not None and not self._has_failed:
                shutil.rmtree(self._temporary_logs, ignore_errors=True)
            elif self._temporary_logs is not None:
                with contextlib.suppress(OSError):  # nothing in it: nothing to keep
                    self._temporary_logs.rmdir()

    async def _stop_surely(self) -> None:
        """Stop; a cancellation (a second Ctrl-C) means that draining took too long."""
        stopping = asyncio.ensure_future(self.stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            self.kill()
            await stopping
            raise

    async def wait(self) -> None:
        """Wait until a service ends, which it should not: raises LocalError that says which."""
        waits = {asyncio.ensure_future(child.wait()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        raise waits[done.pop()].error()

    async def stop(self) -> None:
        """Drain and end all, from the outside in: each still needs the next to drain.

        Once one is missing there is nothing to wait for, so what is left ends soon.
        """
        drain = self._options.stop_seconds + _KILL_SECONDS
        is_orphaned = not self._is_stopped and any(child.has_ended for child in self._children)
        self._has_failed |= is_orphaned
        self._is_stopped = True
        seconds = min(_ORPHAN_SECONDS, drain) if is_orphaned else drain
        for child in reversed(self._children):
            await child.stop(seconds)

    def kill(self) -> None:
        """End all at once, without draining; `stop` still has to follow."""
        for child in self._children:
            child.kill()

    def pid(self, name: str) -> int:
        """Process id of "scheduler", "executor" or "gateway", for whoever will disturb it."""
        return next(child.pid for child in self._children if child.name == name)

    async def _start(self) -> None:
        options = self._options
        listen = settle_address(options.listen, "--listen")
        executor_listen = settle_address(
            options.executor_listen or "127.0.0.1:0", "--executor-listen"
        )
        self.target = connect_address(listen)
        http_listen = options.http_listen and settle_address(options.http_listen, "--http")
        if http_listen == listen:
            raise LocalError(f"--http and --listen are both {listen}: give them two ports")
        if options.log_dir is None:
            self.log_dir = self._temporary_logs = Path(tempfile.mkdtemp(prefix="octavo-"))
        else:
            self.log_dir = options.log_dir
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LocalError(f"cannot write logs to {self.log_dir}: {error.strerror}") from error
        model = await self._resolve_model()
        await self._spawn("executor", self._executor_flags(model, executor_listen))
        await self._spawn("scheduler", self._scheduler_flags(model, listen, executor_listen))
        deadline = time.monotonic() + options.start_seconds
        executor_target = connect_address(executor_listen)
        await self._until("executor", executor_target, _serving(executor_target), deadline)
        await self._until("scheduler", self.target, _serving(self.target), deadline)
        if http_listen:
            self.http_url = f"http://{connect_address(http_listen)}"
            flags = ["--target", self.target, "--listen", http_listen, *self._common_flags()]
            await self._spawn("gateway", flags)
            await self._until("gateway", self.http_url, _answering(self.http_url), deadline)

    async def _resolve_model(self) -> str:
        reference = self._options.model
        if reference and (Path(reference) / "config.json").is_file():
            return reference
        self._on_wait(f"the model {reference or ''}".rstrip())
        arguments = ["model", "fetch", *([reference] if reference else [])]
        return await run_to_last_line("octavo model fetch", "octavo_client", arguments)

    def _executor_flags(self, model: str, listen: str) -> list[str]:
        options = self._options
        flags = ["--model", model, "--listen", listen, *self._common_flags()]
        for flag, value in (
            ("--dtype", options.dtype),
            ("--block-size", options.block_size),
            ("--num-blocks", options.num_blocks),
            ("--num-host-blocks", options.num_host_blocks),
            ("--max-num-batched-tokens", options.max_num_batched_tokens),
            ("--max-num-rows", options.max_num_rows),
        ):
            if value is not None:
                flags += [flag, str(value)]
        return [*flags, *options.executor_args]

    def _scheduler_flags(self, model: str, listen: str, executor_listen: str) -> list[str]:
        executors = connect_address(executor_listen)
        flags = ["--model", model, "--listen", listen, "--executors", executors]
        return [*flags, *self._common_flags(), *self._options.scheduler_args]

    def _common_flags(self) -> list[str]:
        flags = ["--grace-seconds", str(self._options.stop_seconds)]
        return [*flags, "--insecure-bind"] if self._options.insecure_bind else flags

    async def _spawn(self, name: str, flags: list[str]) -> None:
        child = Child(name, self.log_dir / f"{name}.log", echo=self._options.echo_logs)
        self._children.append(child)
        await child.start(_MODULES[name], flags)

    async def _until(
        self, name: str, target: str, probe: Coroutine[None, None, None], deadline: float
    ) -> None:
        """Wait until a service is ready; its death, or another's, ends the wait."""
        self._on_wait(f"the {name} at {target}")
        healthy = asyncio.ensure_future(probe)
        died = asyncio.ensure_future(self.wait())
        try:
            seconds = max(deadline - time.monotonic(), 0.0)
            done, _ = await asyncio.wait(
                {healthy, died}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if died in done:
                await died
            if not done:
                log = self.log_dir / f"{name}.log"
                raise LocalError(
                    f"the {name} was not ready after {self._options.start_seconds:.0f} s "
                    f"(log: {log})",
                    log=log,
                )
            await healthy
        finally:
            for task in (healthy, died):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OctavoError):
                    await task


async def _serving(target: str) -> None:
    """Return when the server at target says SERVING."""
    from octavo_client import NO_RETRIES, AsyncClient

    # Neither TLS nor a key, whatever the environment holds for other servers.
    plain = AsyncClient(f"grpc://{target}", retry=NO_RETRIES, unary_timeout=2.0, api_key="")
    async with plain as client:
        while True:
            with contextlib.suppress(OctavoError):
                if await client.health() is Health.SERVING:
                    return
            await asyncio.sleep(_POLL_SECONDS)


async def _answering(url: str) -> None:
    """Return when the gateway at url says that it is well."""
    import httpx

    async with httpx.AsyncClient(base_url=url, timeout=2.0, trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get("/health")).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(_POLL_SECONDS)
