"""Findings as Markdown, as JSON, and as the lines of the last summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from scheduler_svc.simulator.reports.findings import Claim, Findings, Reference, Row, Table, times
from scheduler_svc.simulator.reports.study import Context, Study

FORMAT_VERSION = 1


def as_json(study: Study, findings: Findings, context: Context) -> str:
    """Return the JSON file of a study: the same bytes for the same seed."""
    record = {
        "format_version": FORMAT_VERSION,
        "name": study.name,
        "title": study.title,
        "question": study.question,
        "command": study.command(context),
        "seed": context.seed,
        "small": context.small,
        **findings.as_dict(),
    }
    return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def as_markdown(study: Study, findings: Findings, context: Context) -> str:
    """Return the section of a study, without its heading."""
    parts = [f"*Asked:* {study.question}", f"*Run:* {findings.setup}"]
    if findings.rows:
        parts.append(_figures(findings))
        parts += _explanations(findings.rows)
    if findings.claims:
        parts.append("\n".join(_claim(each) for each in findings.claims))
    parts += [_table(each) for each in findings.tables]
    if findings.panels:
        parts.append(f"![{study.title}]({study.name}.png)")
    parts += findings.notes
    small = " In its small form, whose figures mean little." if context.small else ""
    parts.append(
        f"Seed {context.seed}. Again by `{study.command(context)}`; all figures are in "
        f"[{study.name}.json]({study.name}.json).{small}"
    )
    return "\n\n".join(parts) + "\n"


def _figures(findings: Findings) -> str:
    lines = [
        f"| | {findings.reference} | ours | ours ÷ {findings.reference} |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in findings.rows:
        ratio = _ratio(row)
        if row.is_off:
            ratio = f"**{ratio}**"
        lines.append(
            f"| {row.what} | {reference_text(row)} | {figure_text(row.ours, row.unit)} | {ratio} |"
        )
    return "\n".join(lines)


def _explanations(rows: Sequence[Row]) -> list[str]:
    """What is off, and why; rows with one explanation together."""
    by_text: dict[str, list[Row]] = {}
    for row in rows:
        if row.is_off:
            by_text.setdefault(row.explanation or "No cause is known.", []).append(row)
    if not by_text:
        return []
    lines = ["Off by more than 10%, and why:"]
    for text, off in by_text.items():
        names = "; ".join(f"{row.what} ({_ratio(row)})" for row in off)
        checks = {row.what: _checks(row) for row in off if row.checks}
        if len(set(checks.values())) == 1:
            checked = next(iter(checks.values()))
        else:
            checked = "; ".join(f"{what}: {figures}" for what, figures in checks.items())
        lines.append(f"* **{names}.** {text}" + (f" Checked: {checked}." if checked else ""))
    return ["\n".join([lines[0], "", *lines[1:]])]


def _checks(row: Row) -> str:
    return ", ".join(f"{figure_text(c.value, row.unit)} with {c.changed}" for c in row.checks)


def _claim(claim: Claim) -> str:
    verdict = "holds" if claim.holds else "**does not hold**"
    detail = f" ({claim.detail})" if claim.detail else ""
    return f"* {claim.text}: {verdict}{detail}."


def _table(table: Table) -> str:
    lines = [f"{table.caption}:", "", "| " + " | ".join(table.header) + " |"]
    lines.append("| --- |" + " ---: |" * (len(table.header) - 1))
    lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    return "\n".join(lines)


# -- figures -----------------------------------------------------------------------


def _seconds(value: float) -> str:
    return f"{value * 1000:,.3g} ms" if value < 1 else f"{value:,.2f} s"


_FORMATS: dict[str, Callable[[float], str]] = {
    "": lambda value: f"{value:.4g}",
    "share": lambda value: f"{value:.1%}",
    "x": times,
    "requests": lambda value: f"{value:.2f}",
    "requests/s": lambda value: f"{value:.3g} req/s",
    "s": _seconds,
    "s/token": lambda value: f"{_seconds(value)} a token",
    "tokens": lambda value: f"{value:,.0f}",
    "tokens/s": lambda value: f"{value:,.0f} tokens/s",
}


def figure_text(value: float, unit: str) -> str:
    """Write a figure with its unit."""
    return _FORMATS[unit](value)


def reference_text(row: Row) -> str:
    """Write the published figure of a row."""
    if row.paper is None:
        return "not published"
    return _reference(row.paper, row.unit)


def _reference(paper: Reference, unit: str) -> str:
    if paper.low is None:
        return "" if paper.high is None else f"up to {figure_text(paper.high, unit)}"
    if paper.high is None:
        return f"at least {figure_text(paper.low, unit)}"
    if paper.low == paper.high:
        return figure_text(paper.low, unit)
    return f"{figure_text(paper.low, unit)} to {figure_text(paper.high, unit)}"


def _ratio(row: Row) -> str:
    if row.paper is None or row.ratio is None:
        return "\N{EN DASH}"
    if row.ratio == 1 and row.paper.low != row.paper.high:
        return "within"
    return f"{row.ratio:.2f}"


# -- the last summary --------------------------------------------------------------


def summary_lines(found: Sequence[tuple[Study, Findings]]) -> list[str]:
    """Return a table in plain text of all figures that have a reference, and of claims."""
    rows = [("study", "what", "reference", "ours", "ratio")]
    broken: list[str] = []
    num_claims = 0
    for study, findings in found:
        for row in findings.rows:
            if row.paper is not None:
                ours = figure_text(row.ours, row.unit)
                ratio = _ratio(row) + ("" if not row.is_off else " *")
                rows.append((study.name, row.what, reference_text(row), ours, ratio))
        num_claims += len(findings.claims)
        broken += [
            f"{study.name}: does not hold: {each.text} ({each.detail})"
            for each in findings.claims
            if not each.holds
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    lines.append("* off by more than 10%: the page says why")
    lines.append(f"{num_claims - len(broken)} of {num_claims} claims hold")
    return lines + broken
