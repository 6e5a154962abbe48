"""A run as a table, as JSON, and as a plot."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo_client.bench.measure import Distribution, Record, Summary
from octavo_client.bench.memory import MemoryUse
from octavo_client.errors import OctavoError

if TYPE_CHECKING:
    from rich.console import Console

FORMAT_VERSION = 1


def print_summary(summary: Summary, console: Console, *, title: str) -> None:
    """Print the table that people read."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    rows: tuple[tuple[str, Distribution | None], ...] = (
        ("TTFT ms", summary.ttft),
        ("ITL ms", summary.itl),
        ("e2e ms", summary.e2e),
        ("normalized ms/token", summary.normalized),
    )
    for name, found in rows:
        if found is not None:
            values = (found.mean, found.p50, found.p90, found.p99, found.max)
            table.add_row(name, *(f"{value * 1000:,.1f}" for value in values))
    console.print(table)
    for line in _lines(summary):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _lines(summary: Summary) -> list[str]:
    slo = summary.slo
    lines = [
        f"{summary.num_whole} of {summary.num_requests} requests in {summary.duration:.2f} s, "
        f"{summary.num_failed} failed, {summary.num_wrong_length} of the wrong length",
        f"{summary.output_tokens_per_second:,.1f} output tokens/s, "
        f"{summary.total_tokens_per_second:,.1f} with prompts "
        f"({summary.num_output_tokens:,} and {summary.num_prompt_tokens:,} tokens)",
        f"goodput {summary.goodput:.2f} of {summary.requests_per_second:.2f} requests/s "
        f"(TTFT <= {slo.ttft:g} s and mean ITL <= {slo.itl:g} s; "
        f"{summary.slo_share:.0%} of all requests)",
    ]
    if summary.max_send_lag > 0.05:
        lines.append(
            f"note: this generator itself sent up to {summary.max_send_lag * 1000:.0f} ms late"
        )
    return lines


def failure_lines(records: Sequence[Record]) -> list[str]:
    """Each kind of failure once, with its count, most frequent first."""
    kinds = Counter(record.error for record in records if record.error is not None)
    return [f"{count}x {error}" for error, count in kinds.most_common(5)]


def to_json(
    summary: Summary,
    records: Sequence[Record],
    *,
    config: dict[str, Any],
    server: dict[str, Any],
    memory: MemoryUse | None = None,
) -> str:
    """The whole run: configuration, server, summary, the pool's use, and every request."""
    return json.dumps(
        {
            "format_version": FORMAT_VERSION,
            "config": config,
            "server": server,
            "summary": summary.to_json(),
            "memory": memory.to_json() if memory is not None else None,
            "requests": [_record_to_json(record) for record in records],
        },
        indent=1,
    )


def _record_to_json(record: Record) -> dict[str, Any]:
    has_tokens = bool(record.arrivals)
    return {
        "id": record.request.id,
        "num_prompt_tokens": len(record.request.prompt),
        "num_wanted_tokens": record.request.num_output_tokens * record.num_choices,
        "num_output_tokens": record.num_received,
        "sent_at": round(record.sent_at, 6),
        "ttft": round(record.ttft, 6) if has_tokens else None,
        "e2e": round(record.e2e, 6),
        "gaps": [round(gap, 6) for gap in record.gaps],
        "error": record.error,
    }


def check_plotting() -> None:
    """Fail before a run, rather than after it, if plots cannot be drawn."""
    try:
        import matplotlib as _  # noqa: F401  # only to see whether it is there
    except ImportError:
        raise OctavoError("--plot needs matplotlib: pip install 'octavo[bench]'") from None


def plot(records: Sequence[Record], path: Path, *, title: str) -> None:
    """Draw how TTFT, ITL and e2e are distributed, and tokens per second over time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    whole = [record for record in records if record.is_whole]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    measures = (
        ("TTFT", [record.ttft for record in whole], axes[0][0]),
        ("ITL", [gap for record in whole for gap in record.gaps], axes[0][1]),
        ("end to end", [record.e2e for record in whole], axes[1][0]),
    )
    for name, values, axis in measures:
        ordered = sorted(values)
        shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
        axis.plot(ordered, shares, drawstyle="steps-post")
        axis.set(
            xlabel=f"{name}, seconds",
            ylabel="share of " + ("tokens" if name == "ITL" else "requests"),
            ylim=(0, 1.02),
        )
        if name == "ITL" and any(value > 0 for value in ordered):
            axis.set_xscale("log")
        axis.grid(alpha=0.3)
    seconds = _tokens_per_second(records)
    axes[1][1].plot(range(len(seconds)), seconds, drawstyle="steps-post")
    axes[1][1].set(xlabel="time, seconds", ylabel="output tokens/s", ylim=(0, None))
    axes[1][1].grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise OctavoError(f"cannot write the plot to {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _tokens_per_second(records: Sequence[Record]) -> list[int]:
    """Output tokens that came in each second of the run."""
    counts: Counter[int] = Counter()
    for record in records:
        for deltas in record.arrivals.values():
            for now, count in deltas:
                counts[int(now)] += count
    return [counts[second] for second in range(max(counts, default=0) + 1)]
