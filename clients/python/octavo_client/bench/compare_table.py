"""A comparison as a table, as JSON, and as a plot: medians, ranges, ratios to the first."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from octavo_client.bench.compare import Comparison, Turn
from octavo_client.bench.measure import Distribution, Summary
from octavo_client.errors import OctavoError

if TYPE_CHECKING:
    from rich.console import Console

FORMAT_VERSION = 1
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        key: its name in JSON.
        label: its name for people, with the unit that `scale` leads to.
        scale: from the value's own unit (seconds, bytes, counts) to the label's.
        digits: after the point.
        of: the value of one turn; None if it has none.
        has_ratio: whether a ratio to the first peer's says something.
    """

    key: str
    label: str
    scale: float
    digits: int
    of: Callable[[Turn], float | None]
    has_ratio: bool = True


def _of_summary(read: Callable[[Summary], float | None]) -> Callable[[Turn], float | None]:
    return lambda turn: None if turn.summary is None else read(turn.summary)


def _percentile(name: str, rank: str) -> Callable[[Turn], float | None]:
    def read(summary: Summary) -> float | None:
        found: Distribution | None = getattr(summary, name)
        return None if found is None else float(getattr(found, rank))

    return _of_summary(read)


METRICS = (
    Metric(
        "output_tokens_per_second",
        "output tokens/s",
        1,
        1,
        _of_summary(lambda summary: summary.output_tokens_per_second),
    ),
    Metric(
        "total_tokens_per_second",
        "total tokens/s",
        1,
        1,
        _of_summary(lambda summary: summary.total_tokens_per_second),
    ),
    Metric("ttft_p50", "TTFT p50 ms", 1e3, 0, _percentile("ttft", "p50")),
    Metric("ttft_p99", "TTFT p99 ms", 1e3, 0, _percentile("ttft", "p99")),
    Metric("itl_p50", "ITL p50 ms", 1e3, 1, _percentile("itl", "p50")),
    Metric("itl_p99", "ITL p99 ms", 1e3, 1, _percentile("itl", "p99")),
    Metric("e2e_p50", "e2e p50 s", 1, 2, _percentile("e2e", "p50")),
    Metric("failed", "failed requests", 1, 0, _of_summary(lambda s: s.num_failed), False),
    Metric("wrong_length", "wrong lengths", 1, 0, _of_summary(lambda s: s.num_wrong_length), False),
    Metric("ready_seconds", "start to ready s", 1, 1, lambda turn: turn.ready_seconds),
    Metric("peak_rss_bytes", "peak RSS GiB", 1 / _GIB, 2, lambda turn: turn.peak_rss_bytes),
)
_PLOTTED = METRICS[:7]


@dataclass(frozen=True, slots=True)
class Spread:
    """One metric of one peer over its turns, in the metric's own unit.

    Attributes:
        ratio: median ÷ the first peer's median; None for the first peer, or if there is
            no median to divide by.
    """

    median: float
    min: float
    max: float
    ratio: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], base: float | None = None) -> Spread | None:
        """Sum values up; None if there are none."""
        if not values:
            return None
        middle = median(values)
        return cls(middle, min(values), max(values), middle / base if base else None)


def spreads(comparison: Comparison) -> dict[str, dict[str, Spread | None]]:
    """Per peer, per metric's key: the spread over the turns that did not fail."""

    def values(name: str, metric: Metric) -> list[float]:
        found = (metric.of(turn) for turn in comparison.turns[name])
        return [value for value in found if value is not None]

    first = comparison.names[0]
    table: dict[str, dict[str, Spread | None]] = {name: {} for name in comparison.names}
    for metric in METRICS:
        base = Spread.of(values(first, metric))
        for name in comparison.names:
            divisor = base.median if base and metric.has_ratio and name != first else None
            table[name][metric.key] = Spread.of(values(name, metric), divisor)
    return table


def print_table(comparison: Comparison, console: Console, *, title: str) -> None:
    """Print a table that can be pasted as Markdown: a row per metric, a column per peer."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.MARKDOWN)
    table.add_column("median (min to max)")
    for name in comparison.names:
        table.add_column(name, justify="right", overflow="fold")
    found = spreads(comparison)
    for metric in METRICS:
        cells = [_cell(found[name][metric.key], metric) for name in comparison.names]
        table.add_row(metric.label, *cells)
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    console.print(table)


def _cell(spread: Spread | None, metric: Metric) -> str:
    """A median, its range if it has one, and its ratio."""
    if spread is None:
        return "-"
    middle, low, high = (
        f"{value * metric.scale:,.{metric.digits}f}"
        for value in (spread.median, spread.min, spread.max)
    )
    text = middle if low == high else f"{middle} ({low} to {high})"
    return text if spread.ratio is None else f"{text} {spread.ratio:.2f}x"


def to_json(
    comparison: Comparison, *, config: dict[str, Any], recipes: dict[str, dict[str, Any]]
) -> str:
    """Configuration, recipes as used, medians and ratios, and every turn."""
    found = spreads(comparison)
    return json.dumps(
        {
            "format_version": FORMAT_VERSION,
            "config": config,
            "baseline": comparison.names[0],
            "peers": [
                {
                    "name": name,
                    "recipe": recipes.get(name),
                    "spread": {
                        key: asdict(spread) if spread else None
                        for key, spread in found[name].items()
                    },
                    "turns": [asdict(turn) for turn in comparison.turns[name]],
                }
                for name in comparison.names
            ],
        },
        indent=1,
    )


def plot(comparison: Comparison, path: Path, *, title: str) -> None:
    """Draw a bar per peer for each speed and latency; whiskers from least to most."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    found = spreads(comparison)
    num_rows = math.ceil(len(_PLOTTED) / 4)
    figure, axes = pyplot.subplots(
        num_rows, 4, figsize=(15, 3.6 * num_rows), layout="constrained", squeeze=False
    )
    figure.suptitle(f"{title}\nmedians, whiskers from least to most")
    colors = mpl.color_sequences["tab10"]
    for metric, axis in zip(_PLOTTED, axes.flat, strict=False):
        for number, name in enumerate(comparison.names):
            spread = found[name][metric.key]
            if spread is None:
                continue
            middle, low, high = (
                value * metric.scale for value in (spread.median, spread.min, spread.max)
            )
            axis.bar(
                number,
                middle,
                color=colors[number % len(colors)],
                yerr=[[middle - low], [high - middle]],
                capsize=4,
                label=name,
            )
            axis.annotate(
                f"{middle:,.{metric.digits}f}",
                (number, high),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axis.set_title(metric.label, fontsize=10)
        axis.set_xticks([])
        axis.margins(y=0.15)
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
    _add_legend(axes.flat[len(_PLOTTED)], comparison.names, colors)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise OctavoError(f"cannot write the plot to {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _add_legend(axis: Any, names: Sequence[str], colors: Sequence[Any]) -> None:
    """Fill the place that the last row leaves free."""
    from matplotlib.patches import Patch

    axis.axis("off")
    patches = [
        Patch(color=colors[number % len(colors)], label=name) for number, name in enumerate(names)
    ]
    axis.legend(handles=patches, loc="center left", frameon=False)
