"""What `sim_vs_real.py` found, as a table and as a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEASURES = (
    "output tokens/s",
    "TTFT p50",
    "TTFT p99",
    "ITL p50",
    "ITL p99",
    "e2e p50",
    "e2e p99",
)
ASIDE = ("steps", "busy seconds", "preemptions")
"""What explains differences, and is not judged."""


@dataclass(frozen=True, slots=True)
class Side:
    """One workload on one side: what is compared, and distributions for the plot."""

    measures: dict[str, float]
    ttft: list[float]
    e2e: list[float]


@dataclass(frozen=True, slots=True)
class Pair:
    """One workload in one round."""

    workload: str
    real: Side
    simulated: Side

    def ratio(self, measure: str) -> float:
        """Simulated ÷ real."""
        real = self.real.measures[measure]
        return self.simulated.measures[measure] / real if real else float("nan")

    def to_json(self) -> dict[str, Any]:
        """What is compared."""
        return {
            "workload": self.workload,
            **{
                name: {
                    "real": round(self.real.measures[name], 5),
                    "simulated": round(self.simulated.measures[name], 5),
                }
                for name in (*MEASURES, *ASIDE)
            },
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Pair:
        """Read what an earlier run wrote; the distributions are not in it."""
        sides = (
            Side({name: data[name][side] for name in (*MEASURES, *ASIDE)}, [], [])
            for side in ("real", "simulated")
        )
        return cls(data["workload"], *sides)


@dataclass(frozen=True, slots=True)
class Row:
    """One measure of one workload, over all rounds.

    Attributes:
        real, simulated: medians.
        ratio: simulated ÷ real, of the medians.
        apart: how far two of the real rounds are apart, the largest ÷ the smallest.
    """

    workload: str
    measure: str
    real: float
    simulated: float
    ratio: float
    apart: float


def rows_of(pairs: Sequence[Pair]) -> list[Row]:
    """Medians over rounds, by workload and measure."""
    rows = []
    for workload in dict.fromkeys(pair.workload for pair in pairs):
        mine = [pair for pair in pairs if pair.workload == workload]
        for name in (*MEASURES, *ASIDE):
            seen = [pair.real.measures[name] for pair in mine]
            real = statistics.median(seen)
            simulated = statistics.median(pair.simulated.measures[name] for pair in mine)
            ratio = simulated / real if real else math.nan
            apart = max(seen) / min(seen) if min(seen) else math.nan
            rows.append(Row(workload, name, real, simulated, ratio, apart))
    return rows


def table(pairs: Sequence[Pair]) -> list[str]:
    """Markdown, for people."""
    lines = [
        "| workload | measure | real | simulated | simulated ÷ real | one real round ÷ another |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows_of(pairs):
        real, simulated = (_show(row.measure, value) for value in (row.real, row.simulated))
        ratio, apart = (
            "" if math.isnan(value) else f"{value:.2f}" for value in (row.ratio, row.apart)
        )
        apart = f"up to {apart}" if apart else ""
        lines.append(
            f"| {row.workload} | {row.measure} | {real} | {simulated} | {ratio} | {apart} |"
        )
    return lines


def _show(name: str, value: float) -> str:
    if name in ("steps", "preemptions"):
        return f"{value:.0f}"
    if name.startswith("ITL"):
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f}" if name == "output tokens/s" else f"{value:.2f} s"


def plot(pairs: Sequence[Pair], path: Path, tolerance: float) -> None:
    """Draw distributions of the last round, and all ratios."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(pair.workload for pair in pairs))
    last = {pair.workload: pair for pair in pairs if pair.real.ttft}
    figure, axes = pyplot.subplots(3, len(names), figsize=(12, 9), layout="constrained")
    figure.suptitle("The simulator against the real system, on one machine")
    for column, name in enumerate(names):
        for row, measure in enumerate(("ttft", "e2e")):
            axis = axes[row][column]
            for label, side in (("real", last[name].real), ("simulated", last[name].simulated)):
                values = getattr(side, measure)
                shares = [(rank + 1) / len(values) for rank in range(len(values))]
                axis.plot(values, shares, drawstyle="steps-post", label=label)
            title = {"ttft": "TTFT", "e2e": "end to end"}[measure]
            axis.set(xlabel=f"{title}, seconds", ylabel="share of requests", ylim=(0, 1.02))
            axis.set_title(f"{name}, {title}")
            axis.grid(alpha=0.3)
        axes[0][column].legend()
        axis = axes[2][column]
        mine = [pair for pair in pairs if pair.workload == name]
        for place, measure in enumerate(MEASURES):
            ratios = [pair.ratio(measure) for pair in mine]
            axis.plot([place] * len(ratios), ratios, "o", color="C0", alpha=0.5)
            axis.plot([place], [statistics.median(ratios)], "_", color="C3", markersize=16)
        axis.axhspan(1 - tolerance, 1 + tolerance, color="C2", alpha=0.15)
        axis.set_xticks(range(len(MEASURES)), MEASURES, rotation=45, ha="right")
        axis.set(ylabel="simulated / real", ylim=(0.5, 1.5))
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
