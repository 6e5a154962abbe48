"""Metrics pushed by OTLP/gRPC, as the variables of OpenTelemetry say.

Off unless OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_METRICS_ENDPOINT is set: then
nothing of OpenTelemetry is imported. Where to, with which headers, certificates and
compression is read from the environment by OpenTelemetry's exporter itself.

A thread reads on the service's event loop and sends. A collector that is slow or gone costs
that thread its time, and nobody else: what was not taken is contained in the next push, for
all totals are since the start.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octavo import otel_variables
from octavo.metrics import Kind, Labels, Metric, MetricsError, Reading, Source, read_from_thread

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import DataT, MetricExporter, MetricsData
    from opentelemetry.sdk.metrics.export import Metric as OtelMetric

_log = logging.getLogger(__name__)

_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_DEFAULT_INTERVAL_MS = 60_000.0
_MIN_INTERVAL_MS, _MAX_INTERVAL_MS = 10.0, 86_400_000.0
_READ_SECONDS = 5.0
LAST_PUSH_SECONDS = 2.0
"""How long the last push may take, at the end of the process."""
_GIVE_UP_SECONDS = 1.0
_EXPORTERS_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_UCUM = {"seconds": "s", "bytes": "By", "": "1"}


def endpoint(environ: Mapping[str, str]) -> str:
    """Where metrics are to be pushed to; "" if nowhere.

    Raises:  MetricsError: if it is to be spoken to in another way than gRPC.
    """
    found = otel_variables.endpoint(environ, "metrics")
    exporters = {each.strip() for each in environ.get("OTEL_METRICS_EXPORTER", "").split(",")}
    unknown = exporters - {"otlp", "console", "none", ""}
    if unknown:
        raise MetricsError(
            f"OTEL_METRICS_EXPORTER must be otlp or none, got {min(unknown)!r}; --metrics-listen "
            "is for Prometheus"
        )
    if not found or otel_variables.is_disabled(environ) or exporters.isdisjoint(("otlp", "")):
        return ""
    foreign = otel_variables.foreign_protocol(environ, "metrics")
    if foreign is not None:
        raise MetricsError(f"{foreign[0]} must be grpc, got {foreign[1]!r}")
    return found


def interval_seconds(environ: Mapping[str, str]) -> float:
    """Seconds between two pushes.

    Raises:  MetricsError: if the variable is not a number of milliseconds within bounds.
    """
    text = environ.get(_INTERVAL, "").strip()
    try:
        milliseconds = float(text) if text else _DEFAULT_INTERVAL_MS
    except ValueError:
        milliseconds = 0.0
    if not _MIN_INTERVAL_MS <= milliseconds <= _MAX_INTERVAL_MS:
        bounds = f"{_MIN_INTERVAL_MS:.0f} to {_MAX_INTERVAL_MS:.0f}"
        raise MetricsError(f"{_INTERVAL} must be milliseconds, {bounds}, got {text!r}")
    return milliseconds / 1000


class OtlpPusher:
    """Pushes what a source is, at an interval and once more at the end."""

    def __init__(self, source: Source, environ: Mapping[str, str], service: Mapping[str, str]):
        """Make the exporter; `start` pushes. To be called on the source's event loop.

        Args:
            source: of the metrics.
            environ: the process's variables.
            service: attributes of the resource, such as service.name, unless the
                environment says otherwise.
        Raises:  MetricsError: if a variable cannot be used, or a package is missing.
        """
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._interval = interval_seconds(environ)
        self._exporter = _make_exporter()
        self._translate = Translator(service)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="octavo-otlp", daemon=True)
        self._has_failed = False

    def start(self) -> None:
        """Begin to push."""
        self._thread.start()

    async def stop(self) -> None:
        """Push once more, and end; in a bounded time, whatever the collector does."""
        self._stopping.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, LAST_PUSH_SECONDS)
        # Ends a push in progress, and whatever it would still try.
        await asyncio.to_thread(self._exporter.shutdown)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _GIVE_UP_SECONDS)

    def _run(self) -> None:
        while not self._stopping.wait(self._interval):
            self._push()
        self._push()

    def _push(self) -> None:
        try:
            reading = read_from_thread(self._source, self._loop, _READ_SECONDS)
            result = self._exporter.export(self._translate(reading))
            self._note("" if result.value == 0 else "the collector did not take them")
        except Exception as error:  # of this push: the next one has it all
            self._note(f"{type(error).__name__}: {error}".removesuffix(": "))

    def _note(self, failure: str) -> None:
        """Log when pushes begin to fail, and when they are well again."""
        if bool(failure) is self._has_failed:
            return
        self._has_failed = bool(failure)
        if failure:
            _log.warning("metrics_push_failed", extra={"reason": failure})
        else:
            _log.info("metrics_push_recovered")


def _make_exporter() -> MetricExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    except ImportError as error:
        raise MetricsError(
            f"{error.name} is not installed: pip install 'octavo[otel]', or unset "
            "OTEL_EXPORTER_OTLP_ENDPOINT"
        ) from None
    # It tells of every attempt; that a push has failed is enough.
    logging.getLogger(_EXPORTERS_LOGGER).setLevel(logging.ERROR)
    try:
        return OTLPMetricExporter()
    except Exception as error:  # of its many variables, each in its own way
        raise MetricsError(f"OTLP: {type(error).__name__}: {error}") from None


class Translator:
    """Makes OpenTelemetry's data of readings.

    Totals and histograms are cumulative, since this object was made.
    """

    def __init__(self, service: Mapping[str, str]) -> None:
        """Name what the metrics are of; variables of the environment win."""
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._resource = Resource(dict(service)).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("octavo", service.get("service.version"))
        self._start_ns = time.time_ns()

    def __call__(self, reading: Reading) -> MetricsData:
        """Give all of a reading."""
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics

        now = time.time_ns()
        metrics = [self._metric(metric, reading, now) for metric in reading]
        scope = ScopeMetrics(self._scope, metrics, schema_url="")
        return MetricsData([ResourceMetrics(self._resource, [scope], schema_url="")])

    def _metric(self, metric: Metric, reading: Reading, now: int) -> OtelMetric:
        from opentelemetry.sdk.metrics.export import Metric as OtelMetric

        unit = _UCUM.get(metric.unit, f"{{{metric.unit}}}")
        return OtelMetric(metric.base_name, metric.help, unit, self._data(metric, reading, now))

    def _data(self, metric: Metric, reading: Reading, now: int) -> DataT:
        from opentelemetry.sdk.metrics import export

        def common(labels: Labels) -> dict[str, Any]:
            return {
                "attributes": dict(zip(metric.labels, labels, strict=True)),
                "start_time_unix_nano": self._start_ns,
                "time_unix_nano": now,
            }

        cumulative = export.AggregationTemporality.CUMULATIVE
        if metric.kind is Kind.HISTOGRAM:
            observed = [
                export.HistogramDataPoint(
                    **common(labels),
                    count=histogram.count,
                    sum=histogram.sum,
                    bucket_counts=histogram.counts,
                    explicit_bounds=histogram.bounds,
                    min=None,  # type: ignore[arg-type]  # not known; unset on the wire
                    max=None,  # type: ignore[arg-type]  # same
                )
                for labels, histogram in reading.histograms(metric).items()
            ]
            return export.Histogram(observed, cumulative)
        points = [
            export.NumberDataPoint(**common(labels), value=value)
            for labels, value in reading.numbers(metric).items()
        ]
        if metric.kind is Kind.COUNTER:
            return export.Sum(points, cumulative, is_monotonic=True)
        return export.Gauge(points)
