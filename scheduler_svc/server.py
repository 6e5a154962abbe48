"""The scheduler process: its gRPC server, its health, and its orderly end."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from octavo.metrics import MetricsError
from octavo.metrics_outlets import MetricsOutlets
from octavo.pem import TlsError
from octavo.tls import ServerTls
from octavo.tracing import TracingError, open_tracing
from octavo.v1 import admin_pb2, inference_pb2

from scheduler_svc import runtime
from scheduler_svc.api import admin, inference
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine import Engine
from scheduler_svc.errors import StartupError
from scheduler_svc.model_files import load_model
from scheduler_svc.observation.metrics import Metrics
from scheduler_svc.observation.observer import Observer
from scheduler_svc.observation.spans import Spans
from scheduler_svc.security.auth import KeyInterceptor
from scheduler_svc.security.gate import Gate
from scheduler_svc.security.keys import KeysError
from scheduler_svc.security.store import KeyStore
from scheduler_svc.text.tokenizer import TextCodec

_log = structlog.get_logger()

_SERVICES = tuple(
    descriptor.full_name
    for file in (inference_pb2, admin_pb2)
    for descriptor in file.DESCRIPTOR.services_by_name.values()
)
_HEALTH_INTERVAL_SECONDS = 0.25
_CLOSE_SECONDS = 1.0
_MAX_METADATA_BYTES = 16 * 1024


class SchedulerServer:
    """One scheduler: servicers over an engine over executor sessions."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Read the files of model, certificates and keys; nothing listens yet.

        Raises:  StartupError: if any of them cannot be used.
        """
        self.config = config
        self._keys = _open_keys(config)
        self._gate = Gate(self._keys)
        model = load_model(config.model, config.model_store)
        codec = TextCodec.load(
            model, num_threads=config.tokenizer_threads, max_pending=config.max_queue
        )
        try:
            files = config.tls_files
            self._tls = None if files is None else ServerTls(files)
            self._spans = Spans(open_tracing("octavo-scheduler", config.scheduler_id))
            self.engine = Engine(config, model.fingerprint, Observer(self._spans))
        except (TlsError, TracingError) as error:
            raise StartupError(str(error)) from None
        self._inference = inference.InferenceServicer(
            self.engine,
            model,
            codec,
            gate=self._gate,
            max_model_len=config.max_model_len,
            reader_timeout_seconds=config.reader_timeout_seconds,
            observer=self.engine.observer,
        )
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # untyped package
        self._metrics = _open_metrics(config, self.engine)
        self._outlets: MetricsOutlets | None = None
        self._health_task: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen, and begin to connect to executors.

        Raises:  StartupError: if the port is taken.
        """
        server = grpc.aio.server(
            interceptors=[] if self._keys is None else [KeyInterceptor(self._keys)],
            options=(
                ("grpc.max_receive_message_length", self.config.max_request_bytes),
                ("grpc.so_reuseport", 0),
                # Clients may ping this often while nothing is sent.
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                # A client that vanished without a word is noticed, and its blocks freed.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.ping_timeout_ms", 5_000),
                ("grpc.max_concurrent_streams", self.config.max_connection_calls),
                # Both: between two different bounds gRPC refuses by chance.
                ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
                ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
                ("grpc.server_handshake_timeout_ms", 10_000),
            ),
        )
        inference.add_to_server(self._inference, server)
        shown = admin.AdminServicer(
            self.engine,
            self.config.scheduler_id,
            self._gate,
            self.config.reader_timeout_seconds,
        )
        admin.add_to_server(shown, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        try:
            self.port = self._add_port(server)
        except RuntimeError as error:
            raise StartupError(
                f"cannot listen on {self.config.listen}: is the port in use? "
                "Give --listen another one"
            ) from error
        if self._metrics is not None:
            self._outlets = _show_metrics(self.config, self._metrics)
        self._warn_of_open_port()
        await server.start()
        self._server = server
        await self.engine.start()
        self._health_task = asyncio.create_task(self._report_health())
        _log.info(
            "scheduler_started",
            port=self.port,
            scheduler_id=self.config.scheduler_id,
            executors=list(self.config.executors),
        )

    def _add_port(self, server: grpc.aio.Server) -> int:
        if self._tls is None:
            return server.add_insecure_port(self.config.listen)
        return server.add_secure_port(self.config.listen, self._tls.credentials)

    def _warn_of_open_port(self) -> None:
        """Say what others can do with a port that they reach."""
        if self.config.is_loopback:
            return
        if self._keys is not None and self._tls is None:
            _log.warning(
                "api_keys_exposed", hint="keys come unencrypted and can be read: give --tls-cert"
            )
        elif self._keys is None and self.config.tls_client_ca is None:
            _log.warning(
                "port_opened_to_anyone",
                hint="whoever reaches it may use it: --api-keys or --tls-client-ca says who may",
            )

    async def stop(self) -> None:
        """Drain: no new work, live streams finish within the grace period, then the end."""
        assert self._server is not None and self._health_task is not None
        self._health_task.cancel()
        self._inference.begin_drain()
        await self._health.enter_graceful_shutdown()
        _log.info("drain_started", num_requests=self.engine.num_requests)
        num_cut_off = await self.engine.drain(self.config.grace_seconds)
        await self._server.stop(_CLOSE_SECONDS)
        await self.engine.stop()
        closing = [asyncio.to_thread(self._spans.close)]
        if self._outlets is not None:
            closing.append(self._outlets.close())
        await asyncio.gather(*closing)
        _log.info("scheduler_stopped", num_cut_off=num_cut_off)

    async def _report_health(self) -> None:
        """SERVING while an executor is claimed and steps advance, whatever the load."""
        last: bool | None = None
        while True:
            healthy = self.engine.is_healthy
            if healthy is not last:
                last = healthy
                serving = health_pb2.HealthCheckResponse.ServingStatus
                status = serving.SERVING if healthy else serving.NOT_SERVING
                for service in ("", *_SERVICES):
                    await self._health.set(service, status)
                _log.info("health_changed", serving=healthy)
            await asyncio.sleep(_HEALTH_INTERVAL_SECONDS)


def _open_keys(config: SchedulerConfig) -> KeyStore | None:
    """Give the keys that the settings name; None if they name none: anybody may call."""
    if config.api_keys is None and not config.api_keys_inline:
        return None
    flag = "--api-keys" if config.api_keys else "--api-keys-inline"
    try:
        return KeyStore(config.api_keys, config.api_keys_inline)
    except KeysError as error:
        raise StartupError(f"{flag}: {error}") from None


def _open_metrics(config: SchedulerConfig, engine: Engine) -> Metrics | None:
    """Count what an engine does, if anybody is to be shown it."""
    try:
        if not MetricsOutlets.are_wanted(config.metrics_address):
            return None
    except MetricsError as error:
        raise StartupError(str(error)) from None
    engine.observer.meter = metrics = Metrics(engine)
    return metrics


def _show_metrics(config: SchedulerConfig, metrics: Metrics) -> MetricsOutlets:
    try:
        return MetricsOutlets.open(
            metrics,
            listen=config.metrics_address,
            service="octavo-scheduler",
            instance=config.scheduler_id,
        )
    except MetricsError as error:
        raise StartupError(str(error)) from None


async def serve(config: SchedulerConfig) -> int:
    """Run until SIGTERM or SIGINT, then drain.

    Returns: 0; or 1 if the engine died, so that the orchestrator starts a new process.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopping.set)
    server = SchedulerServer(config)
    runtime.look_for_garbage_seldom()
    await server.start()
    signalled = asyncio.create_task(stopping.wait())
    ends: set[asyncio.Future[Any]] = {signalled, server.engine.died}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if server.engine.died.done():
        _log.critical("engine_died", error=repr(server.engine.died.result()))
        signalled.cancel()
        return 1
    await server.stop()
    return 0
