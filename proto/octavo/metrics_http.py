"""Metrics over HTTP, as Prometheus reads them: GET /metrics.

The server has threads of its own. The event loop gives the values, in microseconds; to
write them as text takes longer and is done here, with pauses in which the loop may go on.
It speaks no TLS and asks for no key: what it shows has no prompt, no output and no tenant.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.addresses import join_address
from octavo.metrics import Histogram, Kind, MetricsError, Reading, Source, read_from_thread

_log = logging.getLogger(__name__)

PATH = "/metrics"
FLAG = "--metrics-listen"
READ_SECONDS = 5.0
"""How long the event loop may take to give its values; Prometheus waits 10 s as a rule."""
MAX_CONNECTIONS = 8
_IDLE_SECONDS = 5.0
_CONNECTION_SECONDS = 20.0
_POLL_SECONDS = 0.1  # between looks whether to stop
_BACKLOG = 16
_TEXT = "text/plain; charset=utf-8"


def render(families: Iterable[Family], accept: str) -> tuple[bytes, str]:
    """Write families in the best format that the reader accepts.

    Returns: the text and its content type.
    """
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # it asks for a version that is none
        encode, content_type = choose_encoder("")
    return encode(_Families(families)), content_type


def to_families(reading: Reading) -> Iterator[Family]:
    """Give a reading as Prometheus' client library has it, a family at a time."""
    for metric in reading:
        unit = metric.unit if metric.base_name.endswith(f"_{metric.unit}") else ""
        make = partial(_FAMILIES[metric.kind], metric.base_name, metric.help, unit=unit)
        family = make(labels=metric.labels)
        for labels, value in reading.numbers(metric).items():
            family.add_metric(labels, value)
        for labels, histogram in reading.histograms(metric).items():
            family.add_metric(labels, _buckets(histogram), histogram.sum)
        yield family
        # A thread that computes keeps the interpreter to itself for 5 ms: as long as a step.
        time.sleep(0)


_FAMILIES: dict[Kind, Any] = {
    Kind.COUNTER: CounterMetricFamily,
    Kind.GAUGE: GaugeMetricFamily,
    Kind.HISTOGRAM: HistogramMetricFamily,
}


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Observations up to each bound, as Prometheus counts them."""
    up_to, buckets = 0, []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        up_to += count
        buckets.append((floatToGoString(bound), float(up_to)))
    return buckets


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


class MetricsServer:
    """Answers GET /metrics with what the source is at that moment, and the process's own use.

    Invariant: at most MAX_CONNECTIONS are open, none for longer than 20 s.

    Attributes:
        port: that it listens on.
    """

    def __init__(self, source: Source, host: str, port: int) -> None:
        """Listen; `start` answers. To be called on the source's event loop.

        Args:
            source: of the metrics.
            host: to listen on; an IPv6 address stands without brackets.
            port: 0 takes a free one.
        Raises:  MetricsError: if the port is taken or the host is not this machine's.
        """
        loop = asyncio.get_running_loop()
        read = partial(read_from_thread, source, loop, READ_SECONDS)
        self._process = ProcessCollector(registry=CollectorRegistry())
        try:
            self._server = _Server(host, port, lambda: self._families(read()))
        except OSError as error:
            raise MetricsError(_why_not(join_address(host, port), error)) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_POLL_SECONDS,),
            name="octavo-metrics",
            daemon=True,
        )

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    async def stop(self) -> None:
        """Stop listening; answers that are being written are left to their threads."""
        if self._thread.is_alive():
            await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()

    def _families(self, reading: Reading) -> Iterator[Family]:
        yield from to_families(reading)
        yield from self._process.collect()


def _why_not(address: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"cannot listen on {address}: the port is in use; give {FLAG} another one"
    return f"{FLAG}: cannot listen on {address}: {error.strerror or error}"


class _Server(socketserver.ThreadingTCPServer):
    """One thread per connection, and few connections.

    Attributes:
        read: gives the families of this moment.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = _BACKLOG

    def __init__(self, host: str, port: int, read: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.read = read
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or hang up if there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then make room."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  # socketserver's
        """Somebody hung up in the middle: no news, and nothing for the console."""
        _log.debug("metrics_connection_broke", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request of one connection."""

    server: _Server
    server_version = "octavo"
    sys_version = ""
    error_content_type = _TEXT
    error_message_format = "%(code)d %(message)s\n"
    timeout = _IDLE_SECONDS  # of one read or write

    def setup(self) -> None:
        super().setup()
        self._alarm = threading.Timer(_CONNECTION_SECONDS, self._hang_up)
        self._alarm.daemon = True
        self._alarm.start()

    def finish(self) -> None:
        self._alarm.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:  # http.server's name
        """Answer with the metrics."""
        if self.path.partition("?")[0] != PATH:
            self._answer(HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n")
            return
        try:
            body, content_type = render(self.server.read(), self.headers.get("Accept", ""))
        except (TimeoutError, RuntimeError) as error:
            _log.warning("metrics_not_read", extra={"reason": str(error) or "the loop is busy"})
            text = f"the service gave no values within {READ_SECONDS:g} s\n"
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, text.encode())
        except Exception:
            _log.exception("metrics_failed")
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"internal error; see the log\n")
        else:
            self._answer(HTTPStatus.OK, body, content_type)

    do_HEAD = do_GET  # noqa: N815  # http.server's name

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str = _TEXT) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        if status is HTTPStatus.OK and gzip_accepted(self.headers.get("Accept-Encoding", "")):
            body = gzip.compress(body, compresslevel=1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # http.server's name
        """Say nothing: a scrape every few seconds is no news."""
