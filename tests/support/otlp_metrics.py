"""A collector of OpenTelemetry that keeps the metrics that it is sent, as the wire has them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as service
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as service_grpc
from opentelemetry.proto.metrics.v1 import metrics_pb2


class MetricsCollector(service_grpc.MetricsServiceServicer):
    """Answers MetricsService.Export, or refuses.

    Attributes:
        requests: pushes so far.
        headers: of the latest push.
        status: what every push is refused with; None: it is taken.
        port: that it listens on.
    """

    def __init__(self) -> None:
        self.requests: list[service.ExportMetricsServiceRequest] = []
        self.headers: dict[str, str] = {}
        self.status: grpc.StatusCode | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(  # gRPC's name
        self, request: service.ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> service.ExportMetricsServiceResponse:
        if self.status is not None:
            context.abort(self.status, "no")
        self.headers = {str(key): str(value) for key, value in context.invocation_metadata()}
        self.requests.append(request)
        return service.ExportMetricsServiceResponse()

    def latest(self, name: str) -> dict[str, metrics_pb2.Metric]:
        """Metrics of a service's latest push, by name; {} if there was none."""
        for request in reversed(list(self.requests)):
            (of_resource,) = request.resource_metrics
            if _attributes(of_resource)["service.name"] == name:
                (of_scope,) = of_resource.scope_metrics
                return {metric.name: metric for metric in of_scope.metrics}
        return {}

    @property
    def resource(self) -> dict[str, str]:
        """Attributes of the latest push's resource."""
        return _attributes(self.requests[-1].resource_metrics[0])


def _attributes(of_resource: metrics_pb2.ResourceMetrics) -> dict[str, str]:
    return {each.key: each.value.string_value for each in of_resource.resource.attributes}


@contextmanager
def collecting() -> Iterator[MetricsCollector]:
    """Listen on loopback."""
    collector = MetricsCollector()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        service_grpc.add_MetricsServiceServicer_to_server(collector, server)
        collector.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield collector
        finally:
            server.stop(None).wait()
