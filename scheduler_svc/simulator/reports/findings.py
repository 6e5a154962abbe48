"""What a study found: figures beside those of the paper, claims, tables, and what to draw.

Plain values: `render` makes text of them, `pictures` draws them, `as_dict` is what the JSON
file holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 0.10
"""A figure that is off by more is to be explained."""

UNITS = ("", "share", "x", "requests", "requests/s", "s", "s/token", "tokens", "tokens/s")


@dataclass(frozen=True, slots=True)
class Reference:
    """A published figure: exact if both bounds are the same; None is open on that side."""

    low: float | None
    high: float | None

    def ratio(self, ours: float) -> float:
        """Ours ÷ the figure; to the nearer bound of a range, and 1 inside it."""
        if self.low is not None and ours < self.low:
            return ours / self.low
        if self.high is not None and ours > self.high:
            return ours / self.high if self.high else math.inf
        return 1.0


def exactly(figure: float) -> Reference:
    """The paper gives one figure."""
    return Reference(figure, figure)


def between(low: float, high: float) -> Reference:
    """The paper gives a range."""
    return Reference(low, high)


def at_most(high: float) -> Reference:
    """The paper says "up to"."""
    return Reference(None, high)


def at_least(low: float) -> Reference:
    """The paper says "at least"."""
    return Reference(low, None)


@dataclass(frozen=True, slots=True)
class Check:
    """A row's figure with one thing changed, to see whether that is the cause of a difference.

    Attributes:
        value: like the row's `ours`.
        changed: what was, in words that go on after "with".
    """

    value: float
    changed: str


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of ours beside one of the paper.

    Attributes:
        what: is measured.
        ours: a share is from 0 to 1.
        paper: None if no figure is published.
        unit: one of `UNITS`.
        explanation: why ours is off; shown if it is off.
        checks: this figure with what the explanation names changed.
    Raises:  ValueError: if the unit is unknown or a figure is not finite.
    """

    what: str
    ours: float
    paper: Reference | None = None
    unit: str = ""
    explanation: str = ""
    checks: Sequence[Check] = ()

    def __post_init__(self) -> None:
        """Check what renders would stumble on."""
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {self.unit!r}")
        for figure in (self.ours, *(check.value for check in self.checks)):
            if not math.isfinite(figure):
                raise ValueError(f"ours must be finite, got {figure} for {self.what!r}")

    @property
    def ratio(self) -> float | None:
        """Ours ÷ the paper's; None if there is none."""
        return None if self.paper is None else self.paper.ratio(self.ours)

    @property
    def is_off(self) -> bool:
        """Ours differs from the paper's by more than `TOLERANCE`."""
        return self.ratio is not None and abs(self.ratio - 1) > TOLERANCE

    @property
    def is_explained(self) -> bool:
        """What was changed accounts for the difference: a check meets the figure, or passes it."""
        if self.paper is None or self.ratio is None or not self.is_off:
            return True
        ratios = [self.paper.ratio(check.value) for check in self.checks]
        return any(abs(r - 1) <= TOLERANCE or (r > 1) != (self.ratio > 1) for r in ratios)

    def as_dict(self) -> dict[str, Any]:
        """Return what the JSON file holds."""
        paper = None if self.paper is None else [self.paper.low, self.paper.high]
        return {
            "what": self.what,
            "unit": self.unit,
            "paper": paper,
            "ours": rounded(self.ours),
            "ratio": None if self.ratio is None else rounded(self.ratio),
            "is_off": self.is_off,
            "explanation": self.explanation if self.is_off else "",
            "checks": [
                {"with": check.changed, "ours": rounded(check.value)} for check in self.checks
            ],
            "is_explained": self.is_explained,
        }


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence that is true or not.

    Attributes:
        text: the claim.
        holds: whether the figures bear it out.
        detail: the figures; if it does not hold, why.
    """

    text: str
    holds: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Figures that are nobody's claim: cells are text already."""

    caption: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def __post_init__(self) -> None:
        """Check that it is a table."""
        if any(len(row) != len(self.header) for row in self.rows):
            raise ValueError(f"every row of {self.caption!r} must have {len(self.header)} cells")


@dataclass(frozen=True, slots=True)
class Line:
    """Points to join."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True)
class Bars:
    """One value for each name on the x axis."""

    label: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes with lines, or with bars.

    Attributes:
        title, x_label, y_label: with units.
        lines: to draw; an equal label has an equal colour in all panels.
        bars: groups beside each other, or on each other if `stacked`.
        x_names: of the bars' places, or of the ticks of lines whose xs are 0, 1, 2, ...
        log_x, log_y: scales.
        y_limit: top of the y axis; None: as high as needed.
        bound: a dashed line at this y.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    bars: Sequence[Bars] = ()
    x_names: Sequence[str] = ()
    stacked: bool = False
    log_x: bool = False
    log_y: bool = False
    y_limit: float | None = None
    bound: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the series for the JSON file."""
        return {
            "title": self.title,
            "x_label": self.x_label,
            "y_label": self.y_label,
            "x_names": list(self.x_names),
            "lines": [
                {
                    "label": e.label,
                    "xs": [rounded(x) for x in e.xs],
                    "ys": [rounded(y) for y in e.ys],
                }
                for e in self.lines
            ],
            "bars": [
                {"label": each.label, "values": [rounded(value) for value in each.values]}
                for each in self.bars
            ],
        }


@dataclass(frozen=True, slots=True)
class Findings:
    """All that a study found.

    Attributes:
        setup: what was run, in a sentence or two.
        rows: figures beside the paper's.
        claims: what should be true.
        tables: further figures.
        panels: the picture.
        notes: sentences below.
        reference: name of the column beside ours.
    """

    setup: str
    rows: Sequence[Row] = ()
    claims: Sequence[Claim] = ()
    tables: Sequence[Table] = ()
    panels: Sequence[Panel] = ()
    notes: Sequence[str] = field(default=())
    reference: str = "paper"

    def as_dict(self) -> dict[str, Any]:
        """Return what the JSON file holds."""
        return {
            "setup": self.setup,
            "reference": self.reference,
            "rows": [row.as_dict() for row in self.rows],
            "claims": [
                {"text": each.text, "holds": each.holds, "detail": each.detail}
                for each in self.claims
            ],
            "tables": [
                {
                    "caption": each.caption,
                    "header": list(each.header),
                    "rows": [list(row) for row in each.rows],
                }
                for each in self.tables
            ],
            "panels": [panel.as_dict() for panel in self.panels],
            "notes": list(self.notes),
        }


def times(ratio: float) -> str:
    """Write a ratio."""
    return f"{ratio:.2f}\N{MULTIPLICATION SIGN}"


def rounded(value: float) -> float:
    """Six digits: what is beyond them is not a finding."""
    return float(f"{value:.6g}")
