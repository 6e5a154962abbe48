"""A run in numbers: a table for people, JSON for programs, a picture of the time line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.chaos import Report
from tests.chaos.faults import Kind
from tests.chaos.ledger import quantile
from tests.chaos.rest import MOVED

_SHOWN_PROBLEMS = 40


def summary(report: Report) -> dict[str, Any]:
    """All counts of a run, as JSON can hold them."""
    ledger, settings = report.ledger, report.settings
    by_kind_and_class = Counter(
        (kind, target.rpartition(">")[2].partition("-")[0]) for _, kind, target in ledger.faults
    )
    return {
        "seed": settings.seed,
        "num_faults": len(ledger.faults),
        "faults": {f"{kind}, {name}": n for (kind, name), n in sorted(by_kind_and_class.items())},
        "num_clients": settings.num_clients,
        "num_streams": ledger.num_streams.total(),
        "streams": dict(sorted(ledger.num_streams.items())),
        "num_tokens": ledger.num_tokens,
        "num_resumed_streams": ledger.num_resumed_streams,
        "outages": dict(ledger.outages),
        "http": dict(ledger.num_http),
        "longest_pause_seconds": round(max(ledger.pauses, default=0.0), 2),
        "pause_p50_seconds": round(quantile(ledger.pauses, 0.5), 2),
        "pause_p99_seconds": round(quantile(ledger.pauses, 0.99), 2),
        "recovery": {
            "another up" if is_another_up else "none up": {
                "num_streams": len(pauses),
                "p50_seconds": round(quantile(pauses, 0.5), 2),
                "p99_seconds": round(quantile(pauses, 0.99), 2),
            }
            for is_another_up, pauses in ledger.recoveries.items()
        },
        "phase_seconds": report.seconds,
        "events": dict(sorted(report.events.items())),
        "processes": {
            name: {
                "incarnations": after.incarnation,
                "rss_mib": [report.before[name].rss_bytes >> 20, after.rss_bytes >> 20],
                "open_files": [report.before[name].num_fds, after.num_fds],
            }
            for name, after in report.after.items()
        },
        "problems": report.problems,
        "timeline": {
            "faults": ledger.faults,
            "tokens_by_second": sorted(ledger.tokens_by_second.items()),
        },
    }


def print_report(report: Report, console: Console) -> None:
    """Print what people want to know."""
    found = summary(report)
    classes = ("executor", "scheduler", "gateway")
    faults = Table("fault", *classes, title=f"seed {found['seed']}", show_edge=False)
    for kind in Kind:
        faults.add_row(kind, *(str(found["faults"].get(f"{kind}, {each}", 0)) for each in classes))
    console.print(faults)
    table = Table("what", "count", show_edge=False)
    for label, value in (
        ("faults", found["num_faults"]),
        ("streams that ended as undisturbed", found["num_streams"]),
        ("tokens", found["num_tokens"]),
        ("streams resumed at a scheduler", found["num_resumed_streams"]),
        ("requests moved to another executor", report.events[MOVED]),
        ("HTTP requests", _joined(found["http"])),
        ("longest pause of a stream, s", found["longest_pause_seconds"]),
        *(
            (f"pause after an executor's death, {label}, p50 and p99, s", _pauses(pauses))
            for label, pauses in found["recovery"].items()
        ),
        ("seconds", _joined(found["phase_seconds"])),
    ):
        table.add_row(label, str(value))
    table.add_section()
    for name, grown in found["processes"].items():
        rss, files = grown["rss_mib"], grown["open_files"]
        table.add_row(
            f"{name} (process {grown['incarnations']})",
            f"{rss[0]} to {rss[1]} MiB, {files[0]} to {files[1]} open files",
        )
    console.print(table)
    problems = found["problems"]
    for problem in problems[:_SHOWN_PROBLEMS]:
        console.print(f"[red]off:[/] {problem}", highlight=False)
    if problems:
        console.print(f"{len(problems)} things are off; logs: {report.logs}", style="bold red")
    else:
        console.print("every stream ended as undisturbed, and nothing was left", style="green")


def write_json(report: Report, path: Path) -> None:
    """Write all counts."""
    path.write_text(json.dumps(summary(report), indent=2), encoding="utf-8")


def write_plot(report: Report, path: Path) -> None:
    """Draw tokens per second over time, with a mark for every fault."""
    from matplotlib.figure import Figure

    found = summary(report)["timeline"]
    tokens = dict(found["tokens_by_second"])
    seconds = range(max(tokens, default=0) + 1)
    figure = Figure(figsize=(12, 5), layout="constrained")
    marks, curve = figure.subplots(2, sharex=True, height_ratios=(1, 2))
    curve.fill_between(seconds, [tokens.get(each, 0) for each in seconds], step="post", alpha=0.6)
    curve.set_ylabel("tokens/s")
    curve.set_xlabel("seconds")
    kinds = sorted({kind for _, kind, _ in found["faults"]}, reverse=True)
    for kind in kinds:
        times = [at for at, each, _ in found["faults"] if each == kind]
        marks.plot(times, [kind] * len(times), "|", markersize=10)
    figure.savefig(path)


def _pauses(found: dict[str, Any]) -> str:
    return f"{found['p50_seconds']}, {found['p99_seconds']} (of {found['num_streams']})"


def _joined(counts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
