"""Variables of OpenTelemetry that decide whether a signal is sent, and how; read in one place."""

from __future__ import annotations

from collections.abc import Mapping


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry is off altogether."""
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def endpoint(environ: Mapping[str, str], signal: str) -> str:
    """Where a signal, such as "traces", is to be sent; "" if nowhere."""
    _, found = _first(environ, signal, "ENDPOINT")
    return found


def foreign_protocol(environ: Mapping[str, str], signal: str) -> tuple[str, str] | None:
    """Give the variable and its value that ask for another protocol than gRPC; None if none."""
    name, protocol = _first(environ, signal, "PROTOCOL")
    return None if protocol in ("", "grpc") else (name, protocol)


def _first(environ: Mapping[str, str], signal: str, what: str) -> tuple[str, str]:
    """The signal's own variable counts before the one for all."""
    for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{what}", f"OTEL_EXPORTER_OTLP_{what}"):
        value = environ.get(name, "").strip()
        if value:
            return name, value
    return "", ""
