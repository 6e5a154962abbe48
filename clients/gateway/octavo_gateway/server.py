"""The gateway process: its HTTP server, and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import signal
import socket
from collections.abc import Iterator
from typing import Any

import structlog
import uvicorn
from octavo.settings import parse_address
from octavo.tracing import Tracing, TracingError, open_tracing
from octavo_client import AsyncClient, OctavoError, RetryPolicy
from opentelemetry.trace import set_tracer_provider
from starlette.types import ASGIApp

from octavo_gateway.app import Gateway
from octavo_gateway.certificate import Certificate
from octavo_gateway.config import GatewayConfig
from octavo_gateway.errors import StartupError
from octavo_gateway.tracing import TraceContext

_log = structlog.get_logger()

# A scheduler that goes away for a moment is none of the caller's business; one that is
# full is: the caller is told at once, and when to come back.
RETRIES = RetryPolicy(max_attempts=4, retries_overload=False)
_KEEP_ALIVE_SECONDS = 75  # longer than load balancers keep idle connections, as a rule
_MAX_HEAD_BYTES = 65_536
_BACKLOG = 2048
_CLOSE_SECONDS = 1  # for connections, once no request is in flight


class _Server(uvicorn.Server):
    """uvicorn's server without its own handling of signals: draining comes first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(config: GatewayConfig) -> int:
    """Run until SIGTERM or SIGINT, then drain.

    Returns: 0.
    Raises: StartupError: if it cannot listen, or a certificate cannot be used.
    """
    loop_factory = None
    with contextlib.suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_serve(config))


async def _serve(config: GatewayConfig) -> int:
    certificate = None
    if config.tls_cert is not None and config.tls_key is not None:
        certificate = Certificate(config.tls_cert, config.tls_key)
    tracing = _open_tracing()
    listener = _listen(config.listen)
    stopping = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopping.set)
    async with _connect(config) as client:
        gateway = Gateway(
            client,
            timeout=config.timeout,
            max_concurrent_requests=config.max_concurrent_requests,
            max_body_bytes=config.max_body_bytes,
            cors_origins=config.cors_origins,
            max_console_watchers=config.max_console_watchers if config.console else 0,
        )
        http = _uvicorn_config(config, TraceContext(gateway.app, tracing))
        http.load()
        server = _Server(http)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        tasks: list[asyncio.Task[Any]] = [serving, asyncio.create_task(stopping.wait())]
        if certificate is not None and http.ssl is not None:
            tasks.append(asyncio.create_task(certificate.keep_current(http.ssl)))
        _log.info("gateway_started", port=listener.getsockname()[1], target=config.target)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not stopping.is_set():
                raise StartupError("the HTTP server ended by itself; the log says why")
            _log.info("drain_started", num_requests=gateway.gate.num_inside)
            num_cut_off = await gateway.gate.drain(config.grace_seconds)
            server.should_exit = True
            await serving
            _log.info("gateway_stopped", num_cut_off=num_cut_off)
        finally:
            for task in tasks:
                task.cancel()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)
    return 0


def _connect(config: GatewayConfig) -> AsyncClient:
    try:
        return AsyncClient(
            config.target,
            timeout=config.timeout,
            retry=RETRIES,
            # "" is none: a caller without a key must not borrow one from the environment.
            api_key="",
            ca_file=config.ca_file or "",
            cert_file=config.cert_file or "",
            key_file=config.key_file or "",
            server_name=config.server_name,
            allow_insecure_key=config.insecure_target,
        )
    except OctavoError as error:
        raise StartupError(f"--target {config.target}: {error}") from error


def _open_tracing() -> Tracing | None:
    """Trace as the standard variables ask for; the SDK's own spans go the same way."""
    try:
        tracing = open_tracing("octavo-gateway", secrets.token_hex(8))
    except TracingError as error:
        raise StartupError(str(error)) from None
    if tracing is not None:
        set_tracer_provider(tracing.provider)
    return tracing


def _uvicorn_config(config: GatewayConfig, app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",  # the one whose bound on headers can be set
        h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
    )


def _listen(address: str) -> socket.socket:
    """Give a socket that listens.

    Raises:
        StartupError: if the port is taken or the host is not this machine's.
    """
    host, port = parse_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"cannot listen on {address}: the port is in use; give --listen another one"
            ) from None
        raise StartupError(f"cannot listen on {address}: {error.strerror}") from None
