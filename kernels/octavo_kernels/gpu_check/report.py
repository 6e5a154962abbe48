"""What a run says: verdicts on the targets, the JSON, and a table for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo_kernels.gpu_check.cases import CopyCase, DecodeCase, PrefillCase
from octavo_kernels.gpu_check.measure import Measurement
from octavo_kernels.gpu_check.suite import JUDGED_BATCH, JUDGED_CONTEXT, is_judged

MIN_SHARE_OF_COPY = 0.85
MAX_PAGING_OVERHEAD = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """One target against the worst of the cases that it is about.

    `met` is None where no case was measured.
    """

    target: str
    met: bool | None
    worst: float | int | None = None
    worst_case: str = ""
    num_cases: int = 0


def judge(measured: Sequence[Measurement]) -> list[Verdict]:
    """Hold what was measured against the targets."""
    decodes = [each for each in measured if isinstance(each.case, DecodeCase)]
    judged = [
        each for each in decodes if isinstance(each.case, DecodeCase) and is_judged(each.case)
    ]
    where = f"batch >= {JUDGED_BATCH}, context >= {JUDGED_CONTEXT}"
    prefills = [each for each in measured if isinstance(each.case, PrefillCase)]
    copies = [each for each in measured if isinstance(each.case, CopyCase)]
    return [
        _verdict(
            f"decode >= {MIN_SHARE_OF_COPY:.0%} of copy bandwidth ({where})",
            judged,
            "share_of_copy",
            lambda share: share >= MIN_SHARE_OF_COPY,
            worst=min,
        ),
        _verdict(
            f"paging costs decode <= {MAX_PAGING_OVERHEAD:.0%} ({where})",
            judged,
            "paging_overhead",
            lambda overhead: overhead <= MAX_PAGING_OVERHEAD,
            worst=max,
        ),
        _verdict(
            f"paging costs prefill <= {MAX_PAGING_OVERHEAD:.0%}",
            prefills,
            "paging_overhead",
            lambda overhead: overhead <= MAX_PAGING_OVERHEAD,
            worst=max,
        ),
        _verdict(
            "many copies are one launch", copies, "many_launches", lambda count: count == 1, max
        ),
    ]


def as_json(
    environment: dict[str, Any], measured: Sequence[Measurement], verdicts: Sequence[Verdict]
) -> dict[str, Any]:
    """Put a run into one JSON object; cases that were left out are in it, with the reason."""
    return {
        **environment,
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "measurements": [each.as_row() for each in measured],
    }


def has_passed(measured: Sequence[Measurement], verdicts: Sequence[Verdict]) -> bool:
    """Whether nothing failed, and every target was measured and met."""
    return all(verdict.met for verdict in verdicts) and not any(each.failed for each in measured)


def in_short(measurement: Measurement) -> str:
    """Say what came of a case, in a line."""
    if measurement.skipped or measurement.failed:
        kind = "skipped" if measurement.skipped else "FAILED"
        return f"{measurement.case.name}: {kind}, {measurement.skipped or measurement.failed}"
    cells = [f"{title} {cell}" for title, cell in _cells(measurement) if cell]
    return f"{measurement.case.name}: {', '.join(cells)}"


def table(measured: Sequence[Measurement], verdicts: Sequence[Verdict]) -> str:
    """Lay out the figures, what was left out, and the verdicts."""
    lines: list[str] = []
    for kind in dict.fromkeys(each.case.kind for each in measured):
        rows = [each for each in measured if each.case.kind == kind and each.figures]
        if rows:
            lines += [*_columns(rows), ""]
    lines += [in_short(each) for each in measured if each.skipped or each.failed]
    notes = [f"{each.case.name}: {note}" for each in measured for note in each.notes]
    lines += [*notes, ""]
    words = {True: "met", False: "MISSED", None: "not measured"}
    for verdict in verdicts:
        worst = "" if verdict.worst is None else f": {verdict.worst:.3g} in {verdict.worst_case}"
        lines.append(f"{words[verdict.met]:>12}  {verdict.target}{worst}")
    return "\n".join(lines)


def _verdict(
    target: str,
    measured: Iterable[Measurement],
    figure: str,
    is_met: Callable[[float], bool],
    worst: Callable[..., tuple[float, str]],
) -> Verdict:
    known = [(each.figures[figure], each.case.name) for each in measured if figure in each.figures]
    if not known:
        return Verdict(target, met=None)
    value, name = worst(known)
    return Verdict(target, is_met(value), value, name, len(known))


# Title, figure, and how it is written. A case has those of its kind.
_SHOWN: tuple[tuple[str, str, str], ...] = (
    ("GB/s", "gb_per_s", "{:.0f}"),
    ("TFLOP/s", "tflop_per_s", "{:.0f}"),
    ("of copy", "share_of_copy", "{:.1%}"),
    ("of GEMM", "share_of_gemm", "{:.1%}"),
    ("paging", "paging_overhead", "{:+.1%}"),
    ("x SDPA", "faster_than_sdpa", "{:.2f}"),
    ("x gather+SDPA", "faster_than_gather_and_sdpa", "{:.2f}"),
    ("one, us", "one_us", "{:.1f}"),
    ("many, us", "many_us", "{:.1f}"),
    ("launches", "many_launches", "{}"),
    ("out GB/s", "out_gb_per_s", "{:.1f}"),
    ("of plain", "out_share_of_plain", "{:.1%}"),
    ("in GB/s", "in_gb_per_s", "{:.1f}"),
    ("of plain", "in_share_of_plain", "{:.1%}"),
)


def _cells(measurement: Measurement) -> list[tuple[str, str]]:
    figures = measurement.figures
    return [
        (title, form.format(figures[name]) if name in figures else "")
        for title, name, form in _SHOWN
    ]


def _columns(rows: Sequence[Measurement]) -> list[str]:
    """Rows of one kind under their titles, columns that all leave empty left out."""
    cells = [_cells(row) for row in rows]
    used = [place for place in range(len(_SHOWN)) if any(row[place][1] for row in cells)]
    texts = [
        ["", *(_SHOWN[place][0] for place in used)],
        *(
            [row.case.name, *(line[place][1] for place in used)]
            for row, line in zip(rows, cells, strict=True)
        ),
    ]
    widths = [max(len(text[column]) for text in texts) for column in range(len(used) + 1)]
    return [
        "  ".join([text[0].ljust(widths[0]), *map(str.rjust, text[1:], widths[1:])]).rstrip()
        for text in texts
    ]
