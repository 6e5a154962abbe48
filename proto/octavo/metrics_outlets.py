"""The ways out of a process's metrics: Prometheus at an address, OTLP to an endpoint, or none.

What is not asked for is not imported.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from octavo import metrics_otlp
from octavo.addresses import join_address
from octavo.metrics import MetricsError, Source

if TYPE_CHECKING:
    from octavo.metrics_http import MetricsServer
    from octavo.metrics_otlp import OtlpPusher

_log = logging.getLogger(__name__)


class MetricsOutlets:
    """Shows a source's metrics until it is closed.

    Attributes:
        port: of /metrics; 0 if it is not served.
    """

    def __init__(self, server: MetricsServer | None, pusher: OtlpPusher | None) -> None:
        """Hold what `open` has made."""
        self._server = server
        self._pusher = pusher
        self.port = 0 if server is None else server.port

    @staticmethod
    def are_wanted(listen: tuple[str, int] | None, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether anybody is to be shown metrics.

        Raises:  MetricsError: if a variable of OpenTelemetry cannot be used.
        """
        return listen is not None or bool(metrics_otlp.endpoint(environ))

    @classmethod
    def open(
        cls,
        source: Source,
        *,
        listen: tuple[str, int] | None,
        service: str,
        instance: str,
        environ: Mapping[str, str] = os.environ,
    ) -> MetricsOutlets:
        """Show metrics from now on. To be called on the source's event loop.

        Args:
            source: of the metrics.
            listen: host and port of /metrics; None does not serve it.
            service: name of the service, such as "octavo-scheduler".
            instance: that tells processes of one service apart.
            environ: the process's variables.
        Raises:  MetricsError: if the port is taken, a variable cannot be used, or a package
            is missing.
        """
        attributes = {
            "service.name": service,
            "service.instance.id": instance,
            "service.version": importlib.metadata.version("octavo"),
        }
        endpoint = metrics_otlp.endpoint(environ)
        pusher = metrics_otlp.OtlpPusher(source, environ, attributes) if endpoint else None
        server = None if listen is None else _serve(source, *listen)
        if server is not None and listen is not None:
            server.start()
            _log.info("metrics_served", extra={"address": join_address(listen[0], server.port)})
        if pusher is not None:
            pusher.start()
            # A user and a password may stand before the host.
            shown = endpoint.rpartition("@")[2]
            _log.info("metrics_push_started", extra={"endpoint": shown})
        return cls(server, pusher)

    async def close(self) -> None:
        """Push once more, and let go of the port; in a bounded time."""
        outlets = [outlet for outlet in (self._server, self._pusher) if outlet is not None]
        await asyncio.gather(*(outlet.stop() for outlet in outlets))


def _serve(source: Source, host: str, port: int) -> MetricsServer:
    try:
        from octavo.metrics_http import MetricsServer
    except ImportError as error:
        raise MetricsError(
            f"{error.name} is not installed: pip install prometheus-client, or leave out "
            "--metrics-listen"
        ) from None
    return MetricsServer(source, host, port)
