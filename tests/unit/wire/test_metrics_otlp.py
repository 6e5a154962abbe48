"""OTLP: what arrives at a collector, when, and what a collector cannot do to us."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import grpc
import pytest
from octavo import metrics_otlp
from octavo.metrics import Histogram, Kind, Metric, MetricsError, Reading
from octavo.metrics_otlp import OtlpPusher, endpoint, interval_seconds
from octavo.metrics_outlets import MetricsOutlets
from opentelemetry.proto.metrics.v1 import metrics_pb2

from tests.support.otlp_metrics import MetricsCollector, collecting

WAIT = 20.0
URL = "OTEL_EXPORTER_OTLP_ENDPOINT"
METRICS_URL = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
THINGS = Metric("octavo_test_things_total", Kind.COUNTER, "things", "Things.", ("kind",))
LEVEL = Metric("octavo_test_level", Kind.GAUGE, "", "Level.")
BYTES = Metric("octavo_test_sent_bytes_total", Kind.COUNTER, "bytes", "Bytes.")
SECONDS = Metric(
    "octavo_test_wait_seconds", Kind.HISTOGRAM, "seconds", "Wait.", ("of",), (0.5, 2.0)
)


class _Source:
    """Counts how often it was read."""

    def __init__(self) -> None:
        self.num_reads = 0

    async def read(self) -> Reading:
        self.num_reads += 1
        reading = Reading([THINGS, LEVEL, BYTES, SECONDS])
        reading.add(THINGS, 3, "a")
        reading.add(THINGS, self.num_reads, "reads")
        reading.add(LEVEL, 0.25)
        reading.add(BYTES, 2**60)
        waits = Histogram(SECONDS.buckets)
        for value in (0.5, 0.25, 2.0, 8.25):
            waits.observe(value)
        reading.put(SECONDS, waits, "x")
        return reading


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricsCollector]:
    """A real OTLP server, to which the environment points."""
    with collecting() as made:
        monkeypatch.setenv(URL, made.endpoint)
        yield made


def _open(source: _Source) -> MetricsOutlets:
    return MetricsOutlets.open(source, listen=None, service="octavo-test", instance="me-1")


async def test_the_last_push_has_exactly_the_values(collector: MetricsCollector) -> None:
    """Counters are cumulative sums, gauges are gauges, histograms have their bounds."""
    before = time.time_ns()
    outlets = _open(_Source())
    await outlets.close()
    after = time.time_ns()
    assert len(collector.requests) == 1, "the interval is a minute, the end is now"
    last = collector.latest("octavo-test")
    things = last["octavo_test_things"]
    assert things.sum.is_monotonic
    assert things.sum.aggregation_temporality == metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
    found = {p.attributes[0].value.string_value: p.as_int for p in things.sum.data_points}
    assert found == {"a": 3, "reads": 1}
    assert {p.attributes[0].key for p in things.sum.data_points} == {"kind"}
    for point in things.sum.data_points:
        assert before <= point.start_time_unix_nano <= point.time_unix_nano <= after
    (level,) = last["octavo_test_level"].gauge.data_points
    assert level.as_double == 0.25
    (sent,) = last["octavo_test_sent_bytes"].sum.data_points
    assert sent.as_int == 2**60
    waits = last["octavo_test_wait_seconds"].histogram
    assert waits.aggregation_temporality == metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
    (wait,) = waits.data_points
    assert (wait.count, wait.sum) == (4, 11.0)
    assert list(wait.bucket_counts) == [2, 1, 1]
    assert list(wait.explicit_bounds) == [0.5, 2.0]
    assert not wait.HasField("min") and not wait.HasField("max"), "they are not known"
    units = {name: metric.unit for name, metric in last.items()}
    assert units == {
        "octavo_test_things": "{things}",
        "octavo_test_level": "1",
        "octavo_test_sent_bytes": "By",
        "octavo_test_wait_seconds": "s",
    }


async def test_pushes_come_at_the_interval(
    collector: MetricsCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In milliseconds, as the variable says; each has the state of its moment."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    outlets = _open(_Source())
    async with asyncio.timeout(WAIT):
        while len(collector.requests) < 3:
            await asyncio.sleep(0.01)
    await outlets.close()
    reads = [
        point.as_int
        for request in collector.requests
        for metric in request.resource_metrics[0].scope_metrics[0].metrics
        if metric.name == "octavo_test_things"
        for point in metric.sum.data_points
        if point.attributes[0].value.string_value == "reads"
    ]
    assert reads == list(range(1, len(reads) + 1))


async def test_the_resource_names_the_process(
    collector: MetricsCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, unless the environment says otherwise; headers go along."""
    await _open(_Source()).close()
    assert collector.resource["service.name"] == "octavo-test"
    assert collector.resource["service.instance.id"] == "me-1"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=pod-7,service.instance.id=you-2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=ops")
    await _open(_Source()).close()
    assert collector.resource["service.name"] == "chat"
    assert collector.resource["service.instance.id"] == "you-2"
    assert collector.resource["k8s.pod.name"] == "pod-7"
    assert collector.headers["x-tenant"] == "ops"


async def test_failed_pushes_are_told_once_and_lose_nothing(
    collector: MetricsCollector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next one that is taken has all of it."""
    caplog.set_level("INFO", metrics_otlp.__name__)
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    collector.status = grpc.StatusCode.INVALID_ARGUMENT
    source = _Source()
    outlets = _open(source)
    async with asyncio.timeout(WAIT):
        while source.num_reads < 3:
            await asyncio.sleep(0.01)
    collector.status = None
    async with asyncio.timeout(WAIT):
        while not collector.requests:
            await asyncio.sleep(0.01)
    await outlets.close()
    events = [r.message for r in caplog.records if r.name == metrics_otlp.__name__]
    assert events == ["metrics_push_failed", "metrics_push_recovered"]


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_collector_that_is_gone_keeps_nobody(
    monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    """Refused or unanswered: the end comes within the time that is given to the last push."""
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        if is_silent:
            hole.listen()  # and never accepts
        monkeypatch.setenv(URL, f"http://127.0.0.1:{hole.getsockname()[1]}")
        monkeypatch.setattr(metrics_otlp, "LAST_PUSH_SECONDS", 0.2)
        outlets = _open(_Source())
        async with asyncio.timeout(WAIT / 2):
            await outlets.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ""),
        ({URL: "http://all:4317"}, "http://all:4317"),
        ({METRICS_URL: "http://metrics:4317"}, "http://metrics:4317"),
        ({URL: "http://all:4317", METRICS_URL: "http://metrics:4317"}, "http://metrics:4317"),
        ({URL: ""}, ""),
        ({URL: "http://all:4317", "OTEL_METRICS_EXPORTER": "none"}, ""),
        ({URL: "http://all:4317", "OTEL_METRICS_EXPORTER": "console,otlp"}, "http://all:4317"),
        ({URL: "http://all:4317", "OTEL_SDK_DISABLED": "true"}, ""),
        ({URL: "http://all:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http://all:4317"),
        (
            {
                URL: "http://all:4317",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc",
            },
            "http://all:4317",
        ),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, ""),
    ],
)
def test_the_standard_variables_turn_it_on_and_off(environ: dict[str, str], expected: str) -> None:
    """Those for metrics win over those for everything."""
    assert endpoint(environ) == expected
    assert MetricsOutlets.are_wanted(None, environ) is bool(expected)


def test_another_protocol_is_refused() -> None:
    """Rather than to speak gRPC to who expects HTTP."""
    with pytest.raises(MetricsError) as caught:
        endpoint({URL: "http://all:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
    assert str(caught.value) == "OTEL_EXPORTER_OTLP_PROTOCOL must be grpc, got 'http/protobuf'"


@pytest.mark.parametrize("text", ["soon", "0", "-5", "nan", "1e12"])
def test_an_interval_out_of_bounds_is_refused(text: str) -> None:
    """With its name and its bounds."""
    with pytest.raises(MetricsError) as caught:
        interval_seconds({"OTEL_METRIC_EXPORT_INTERVAL": text})
    assert str(caught.value) == (
        f"OTEL_METRIC_EXPORT_INTERVAL must be milliseconds, 10 to 86400000, got {text!r}"
    )


def test_the_interval_is_a_minute_unless_told() -> None:
    """As OpenTelemetry has it."""
    assert interval_seconds({}) == 60.0
    assert interval_seconds({"OTEL_METRIC_EXPORT_INTERVAL": "1500"}) == 1.5


async def test_a_variable_that_the_exporter_cannot_use_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A service says it at its start, not in its first push."""
    monkeypatch.setenv(URL, "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "soon")
    with pytest.raises(MetricsError, match="OTLP: ") as caught:
        OtlpPusher(_Source(), {}, {})
    assert "\n" not in str(caught.value)


def test_nothing_is_imported_for_what_is_off() -> None:
    """Neither OpenTelemetry nor Prometheus' library, by neither service."""
    program = (
        "import sys, scheduler_svc.server, executor_svc.server;"
        "print(*{name.split('.')[0] for name in sys.modules}"
        " & {'opentelemetry', 'prometheus_client'})"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
