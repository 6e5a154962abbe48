"""The executor's server: starts at once, loads behind it, drains on a signal.

Health is NOT_SERVING while the model loads, while a step hangs and while draining; a
long queue leaves it SERVING.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from octavo.metrics import MetricsError
from octavo.metrics_outlets import MetricsOutlets
from octavo.pem import TlsError
from octavo.tls import ServerTls
from octavo.tracing import Tracing, TracingError, open_tracing
from octavo.v1 import executor_pb2

from executor_svc.config import ExecutorConfig
from executor_svc.device_thread import DeviceThread, Engine
from executor_svc.errors import Draining, StartupError
from executor_svc.logs import get_logger
from executor_svc.servicer import ExecutorServicer

_log = get_logger(__name__)

SERVICE = executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"].full_name

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    ("grpc.max_receive_message_length", 64 << 20),  # a resync carries every token
    # A scheduler behind a cut network must be noticed, so that another may follow.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # In gRPC 1.85 it is this one that counts.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Of one connection, which whoever reaches the port may open.
    ("grpc.max_concurrent_streams", 100),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    ("grpc.server_handshake_timeout_ms", 10_000),
]

_WATCH_SECONDS = 0.2
_DRAIN_POLL_SECONDS = 0.05
_STOP_SECONDS = 1.0
_JOIN_SECONDS = 2.0

_T = TypeVar("_T")


class ExecutorServer:
    """One executor process's servers and its device thread."""

    def __init__(self, config: ExecutorConfig, load: Callable[[], Engine]) -> None:
        """`load` runs on the device thread and gives the engine that the thread drives.

        Raises:
            StartupError: if the files of the port's TLS cannot be used.
        """
        self._config = config
        self._tls = _port_tls(config)
        self._device = DeviceThread(load)
        self._servicer = ExecutorServicer(self._device)
        self._tracing = _open_tracing(self._servicer.instance)
        self._servicer.tracing = self._tracing
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined] # not in the stubs
        self._server = grpc.aio.server(options=_OPTIONS)
        self._watcher: asyncio.Task[None] | None = None
        self._outlets: MetricsOutlets | None = None
        self.address = ""

    async def start(self) -> None:
        """Listen, then begin to load.

        Raises:
            StartupError: if the address cannot be had.
        """
        self._server.add_generic_rpc_handlers((self._servicer.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server
        )
        await self._report(serving=False)
        host = self._config.listen.rpartition(":")[0]
        try:
            port = self._add_port()
        except RuntimeError:
            port = 0
        if port == 0:
            raise StartupError(
                f"cannot listen on {self._config.listen}: is the port in use? "
                "Give --listen another one"
            )
        self.address = f"{host}:{port}"
        if not self._config.is_loopback and self._config.tls_client_ca is None:
            _log.warning(
                "port_opened_to_anyone",
                address=self.address,
                hint="whoever reaches it may claim this executor; --tls-client-ca says who may",
            )
        self._outlets = self._show_metrics()
        await self._server.start()
        self._device.start()

    def _add_port(self) -> int:
        if self._tls is None:
            return self._server.add_insecure_port(self._config.listen)
        return self._server.add_secure_port(self._config.listen, self._tls.credentials)

    def _show_metrics(self) -> MetricsOutlets | None:
        try:
            if not MetricsOutlets.are_wanted(self._config.metrics_address):
                return None
            return MetricsOutlets.open(
                self._servicer.metrics,
                listen=self._config.metrics_address,
                service="octavo-executor",
                instance=self._servicer.instance,
            )
        except MetricsError as error:
            raise StartupError(str(error)) from None

    async def wait_ready(self) -> None:
        """Wait for the model.

        Raises:
            StartupError: if it cannot be loaded.
        """
        description = await _outcome(self._device.ready)
        await self._report(serving=True)
        self._watcher = asyncio.create_task(self._watch_steps())
        _log.info(
            "executor_ready",
            address=self.address,
            model=description.model,
            fingerprint=description.fingerprint,
            dtype=description.dtype,
            device=description.device,
            attention=description.attention,
            block_size=description.block_size,
            num_device_blocks=description.num_device_blocks,
            num_host_blocks=description.num_host_blocks,
            max_model_len=description.max_model_len,
            kv_check=self._config.kv_check,
        )

    async def wait_died(self) -> BaseException:
        """Wait until the device thread dies; gives the reason."""
        return await _outcome(self._device.died)

    @property
    def has_died(self) -> bool:
        """Whether the device thread, or another rank, is gone."""
        return self._device.died.done()

    async def drain(self) -> None:
        """Take no new owner, and leave the present one time to move its rows.

        Ends once the owner has left or has no rows, or the grace is over.
        """
        self._servicer.drain()
        if self._watcher is not None:
            self._watcher.cancel()
        await self._health.enter_graceful_shutdown()
        give_up = time.monotonic() + self._config.grace_seconds
        while self._servicer.lease is not None:
            # First of all: what the owner is told goes out before its stream may end.
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
            if not self._device.num_rows or self._device.died.done():
                break
            if time.monotonic() >= give_up:
                _log.warning("drain_timed_out", num_rows=self._device.num_rows)
                break
        if self._servicer.lease is not None:
            self._servicer.lease.end(Draining("this executor is shutting down"))

    async def stop(self) -> None:
        """Close the server, cutting streams that still run, and end the device thread."""
        if self._watcher is not None:
            self._watcher.cancel()
        self._device.stop()
        await self._server.stop(_STOP_SECONDS)
        closing: list[Coroutine[Any, Any, None]] = []
        if self._outlets is not None:
            closing.append(self._outlets.close())
        if self._tracing is not None:
            closing.append(asyncio.to_thread(self._tracing.close))
        await asyncio.gather(*closing)
        # A load in progress ends with the process; nothing of it needs an end of its own.
        is_whole = self._device.ready.done() and not self._device.died.done()
        seconds = _JOIN_SECONDS if is_whole else 0.0
        if not await asyncio.to_thread(self._device.join, seconds) and seconds:
            _log.warning("device_stuck", busy_seconds=round(self._device.busy_seconds(), 1))

    async def _report(self, *, serving: bool) -> None:
        values = health_pb2.HealthCheckResponse
        status = values.SERVING if serving else values.NOT_SERVING
        for name in (health.OVERALL_HEALTH, SERVICE):
            await self._health.set(name, status)

    async def _watch_steps(self) -> None:
        """Say NOT_SERVING while one step takes longer than its deadline."""
        hung = False
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            seconds = self._device.busy_seconds()
            if (seconds > self._config.step_deadline_seconds) != hung:
                hung = not hung
                await self._report(serving=not hung)
                if hung:
                    _log.error("step_hung", seconds=round(seconds, 1))
                else:
                    _log.info("step_recovered")


def _port_tls(config: ExecutorConfig) -> ServerTls | None:
    files = config.tls_files
    try:
        return None if files is None else ServerTls(files)
    except TlsError as error:
        raise StartupError(str(error)) from None


def _open_tracing(instance: str) -> Tracing | None:
    try:
        return open_tracing("octavo-executor", instance)
    except TracingError as error:
        raise StartupError(str(error)) from None


async def serve(config: ExecutorConfig, load: Callable[[], Engine]) -> int:
    """Run an executor until a signal or the death of its device.

    Returns: the exit status: 0 after a drain, 1 if the device died. A device that hangs,
        or a load in progress, leaves its thread behind.

    Raises:
        StartupError: if the service cannot start.
    """
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    server = ExecutorServer(config, load)
    try:
        status = await _run(server, stopping)
    finally:
        await server.stop()
    _log.info("executor_stopped", status=status)
    return status


async def _run(server: ExecutorServer, stopping: asyncio.Event) -> int:
    await server.start()
    if not await _unless(stopping, server.wait_ready()):
        return 0
    if await _unless(stopping, server.wait_died()):
        _log.critical("device_died", reason=repr(await server.wait_died()))
        return 1
    _log.info("drain_started")
    await server.drain()
    return 1 if server.has_died else 0


async def _unless(stopping: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Wait for `work`, or give up on it when stopping; True if it was done."""
    task, stop = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        task.cancel()
        stop.cancel()


async def _outcome(future: Future[_T]) -> _T:
    """A thread's future, awaited without handing it the waiter's cancellation."""
    return await asyncio.shield(asyncio.wrap_future(future))
