"""What the variables of OpenTelemetry turn on, and what is wrong with them."""

from __future__ import annotations

import pytest
from octavo.tracing import TracingError, exporter_name, open_tracing, parent_context
from opentelemetry.trace import get_current_span

URL = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "none"),
        ({URL: " "}, "none"),
        ({URL: "http://all:4317"}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces:4317"}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://metrics:4317"}, "none"),
        ({URL: "http://all:4317", "OTEL_TRACES_EXPORTER": "none"}, "none"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        ({URL: "http://all:4317", "OTEL_SDK_DISABLED": "TRUE"}, "none"),
        ({URL: "http://all:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "otlp"),
    ],
)
def test_traces_are_on_where_they_are_asked_for(environ: dict[str, str], expected: str) -> None:
    assert exporter_name(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER: 'zipkin', must be otlp"),
        (
            {URL: "http://all:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            "OTEL_EXPORTER_OTLP_PROTOCOL: 'http/protobuf', must be grpc",
        ),
    ],
)
def test_what_is_not_here_is_refused_by_name(environ: dict[str, str], message: str) -> None:
    with pytest.raises(TracingError, match=message):
        exporter_name(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "abc"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_SPAN_LINK_COUNT_LIMIT", "-1"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "x"),
    ],
)
def test_a_variable_of_the_sdk_that_is_wrong_is_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(URL, "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    with pytest.raises(TracingError, match="OTEL_") as caught:
        open_tracing("octavo-test", "one")
    assert "\n" not in str(caught.value)


def test_off_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL, raising=False)
    assert open_tracing("octavo-test", "one") is None


@pytest.mark.parametrize("tracestate", ["", "a=1,b=2", "format =;=", "x" * 9000])
def test_a_parent_is_read_whatever_stands_beside_it(
    tracestate: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing that a caller wrote gets into the log."""
    span = get_current_span(parent_context(PARENT, tracestate)).get_span_context()
    assert f"{span.trace_id:032x}" == TRACE
    assert caplog.records == []
