"""Write docs/metrics.md from the definitions of all metrics.

Usage: python -P scripts/generate_metrics_doc.py [OUTPUT]

The output (default: docs/metrics.md) is committed; a test generates it afresh and fails on
any difference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from octavo.metrics import Metric
from octavo_gateway import metrics as gateway

from executor_svc import metrics as executor
from scheduler_svc.observation import definitions as scheduler

ROOT = Path(__file__).resolve().parent.parent

SERVICES: dict[str, Sequence[Metric]] = {
    "Scheduler": scheduler.METRICS,
    "Executor": executor.METRICS,
    "Gateway": gateway.METRICS,
}

INTRO = """\
# Metrics

The tables are generated from the definitions in the code by `make reference`; change those, not
this page. How they are read is in [observability.md](observability.md), what to do when one
alarms in [alerts.md](alerts.md).

## Where they are

| what | how |
| --- | --- |
| scheduler, executor: Prometheus | `--metrics-listen HOST:PORT`, then `http://HOST:PORT/metrics` |
| gateway: Prometheus | `/metrics` on its own port |
| scheduler, executor: OTLP/gRPC | `OTEL_EXPORTER_OTLP_ENDPOINT`, or its `_METRICS_` form |

The flag has its variables, `OCTAVO_SCHEDULER_METRICS_LISTEN` and `OCTAVO_EXECUTOR_METRICS_LISTEN`:
`octavo serve` starts both services with those of its own environment.

The services serve no metrics unless they are told where: a port that nobody asked for is one more
to guard, and two executors of one machine would quarrel about it. As for every port, an address of
this machine (`127.0.0.1:9464`) is reached from here alone; in a cluster give `0.0.0.0:9464`.
The port speaks no TLS and asks for no key, so keep it to those who monitor: it shows sizes, rates
and the addresses of executors, and no prompt, no output and no tenant.

A scrape is answered with the state of that moment, between two steps. If the event loop does not
give it within 5 seconds the answer is 503, so a service that hangs is `up == 0`. At most 8
connections are open at a time. The format is Prometheus' text or OpenMetrics, as the scraper asks.

OTLP pushes the same values, cumulative, every `OTEL_METRIC_EXPORT_INTERVAL` milliseconds (60000)
and once more at the end, under the same names without `_total`. Headers, certificates, compression
and timeouts are OpenTelemetry's variables for OTLP/gRPC; `OTEL_SERVICE_NAME` and
`OTEL_RESOURCE_ATTRIBUTES` name the process, else `octavo-scheduler` or `octavo-executor` with its
`service.instance.id`. `OTEL_METRICS_EXPORTER=none` or `OTEL_SDK_DISABLED=true` turns it off. A
collector that does not answer costs a thread of its own, and two seconds at the end.

OTLP needs the extra `otel`: without it a service that is asked to push does not start, and says so.

## What their labels hold

`executor` is the address of an executor as its scheduler knows it. When it is gone its gauges are
gone with it. Its totals stay, and go on when one comes back to that address; of addresses that are
gone the latest 32 are kept. All other labels have a fixed, short list of values. Nothing is
labelled by tenant or request: these come from callers, and have no bound.

## Grafana and Prometheus

[deploy/grafana/octavo.json](../deploy/grafana/octavo.json) is a dashboard to import,
[deploy/prometheus/rules.yml](../deploy/prometheus/rules.yml) has recording rules and alerts.
`make observability-check` lets promtool check them and scrapes a running stack with Prometheus.
"""


def main(output: Path) -> None:
    """Write the page."""
    output.write_text(render(), encoding="utf-8")


def render() -> str:
    """Return the whole page."""
    parts = [INTRO]
    for service, metrics in SERVICES.items():
        parts += [f"## {service}\n", table(metrics)]
    parts += ["## Buckets\n", "\n".join(buckets()) + "\n"]
    return "\n".join(parts)


def table(metrics: Iterable[Metric]) -> str:
    """One service's metrics as a table in Markdown."""
    lines = ["| name | type | unit | labels | what |", "| --- | --- | --- | --- | --- |"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        cells = (f"`{metric.name}`", metric.kind.value, metric.unit, labels, metric.help)
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return "\n".join(lines) + "\n"


def buckets() -> Iterator[str]:
    """Yield a line for each list of bounds: whose it is."""
    users: dict[tuple[float, ...], list[str]] = {}
    for metrics in SERVICES.values():
        for metric in metrics:
            if metric.buckets:
                users.setdefault(metric.buckets, []).append(f"`{metric.name}`")
    for bounds, names in users.items():
        shown = ", ".join(f"{bound:g}" for bound in bounds)
        yield f"* {', '.join(names)}: {shown}"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "metrics.md")
