"""Draws a study's panels into one PNG. matplotlib is only needed here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scheduler_svc.simulator.reports.findings import Panel

_MARKERS = ("o", "s", "^", "v", "D", "x", "P")
_PANEL_INCHES = (4.6, 3.5)


class PicturesError(RuntimeError):
    """Nothing can be drawn; the message says what to install."""


def check_plotting() -> None:
    """Fail before a run, rather than after it, if plots cannot be drawn.

    Raises:  PicturesError.
    """
    try:
        import matplotlib as _  # noqa: F401  # only to see whether it is there
    except ImportError:
        raise PicturesError("plots need matplotlib: pip install 'octavo[bench]'") from None


def draw(panels: Sequence[Panel], path: Path, *, title: str) -> None:
    """Write a picture with all panels, in rows of three at most.

    Raises:  PicturesError: if it cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    num_columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    size = (_PANEL_INCHES[0] * num_columns, _PANEL_INCHES[1] * num_rows + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    figure.suptitle(title)
    places = [axes for row in grid for axes in row]
    # One colour for a label in all panels of a picture.
    labels: dict[str, int] = {}
    for panel in panels:
        for label in [line.label for line in panel.lines] + [bars.label for bars in panel.bars]:
            labels.setdefault(label, len(labels))
    for axes, panel in zip(places, panels, strict=False):
        _draw_panel(axes, panel, labels)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    try:
        figure.savefig(path, dpi=120, metadata={"Software": None})
    except (OSError, ValueError) as error:
        raise PicturesError(f"cannot write the plot to {path}: {error}") from error


def _draw_panel(axes: Any, panel: Panel, labels: dict[str, int]) -> None:
    for line in panel.lines:
        number = labels[line.label]
        axes.plot(
            line.xs,
            line.ys,
            label=line.label,
            color=f"C{number % 10}",
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=4,
        )
    if panel.bars:
        _draw_bars(axes, panel, labels)
    if panel.x_names:
        axes.set_xticks(range(len(panel.x_names)), panel.x_names)
    if panel.bound is not None:
        axes.axhline(panel.bound, color="0.4", linestyle="--", linewidth=1)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if panel.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, panel.y_limit)
    axes.grid(alpha=0.3)
    if len(panel.lines) + len(panel.bars) > 1:
        is_wide = panel.stacked  # the bars leave no corner free: above them
        axes.legend(
            fontsize="small",
            ncols=2 if is_wide else 1,
            loc="upper center" if is_wide else "best",
        )


def _draw_bars(axes: Any, panel: Panel, labels: dict[str, int]) -> None:
    num_places = len(panel.bars[0].values)
    width = 0.65 if panel.stacked else 0.8 / len(panel.bars)
    below = [0.0] * num_places
    for index, bars in enumerate(panel.bars):
        shift = 0.0 if panel.stacked else (index - (len(panel.bars) - 1) / 2) * width
        axes.bar(
            [place + shift for place in range(num_places)],
            bars.values,
            width,
            bottom=below if panel.stacked else None,
            label=bars.label,
            color=f"C{labels[bars.label] % 10}",
        )
        if panel.stacked:
            below = [base + value for base, value in zip(below, bars.values, strict=True)]
