"""Figure 2: where K/V memory is, by kind of waste."""

from __future__ import annotations

from itertools import pairwise

from scheduler_svc.simulator import Report
from scheduler_svc.simulator.reports.findings import (
    Bars,
    Check,
    Claim,
    Findings,
    Panel,
    Row,
    exactly,
)
from scheduler_svc.simulator.reports.study import Context, Study
from scheduler_svc.simulator.reports.systems import (
    LABELS,
    MAX,
    ORACLE,
    OURS,
    POW2,
    SHAREGPT,
    Job,
    Load,
    run_all,
)

_ORDER = (MAX, POW2, ORACLE, OURS)
_KINDS = ("token states", "reserved", "internal", "external")
_PAPER: dict[str, tuple[float | None, ...]] = {
    MAX: (0.204, 0.133, 0.573, 0.089),
    POW2: (0.268, 0.179, 0.136, 0.416),
    ORACLE: (0.382, 0.252, None, 0.366),
    OURS: (0.963, None, None, None),
}
_SIGMAS = (0.7, 1.3)
_EXPLANATION = (
    "How well lengths fill chunks of powers of two depends on how far they spread, which is not "
    "published: sigma is 1.0 here."
)


def run(context: Context) -> Findings:
    """Serve ShareGPT at 2 requests/s, and look where the slots are."""
    seconds = context.pick(1200.0, 60.0)
    jobs = {
        (system, sigma): Job(Load(SHAREGPT, 2.0, seconds, context.seed, sigma=sigma), system=system)
        for sigma in (1.0, *_SIGMAS)
        for system in _ORDER
    }
    found = {key: _shares(report) for key, report in run_all(context, jobs).items()}
    shares = {system: found[system, 1.0] for system in _ORDER}
    rows = []
    for number, kind in enumerate(_KINDS):
        for system in _ORDER:
            paper = _PAPER[system][number]
            if paper is None and (number or system != OURS):
                continue
            rows.append(
                Row(
                    f"{LABELS[system]}: {kind}",
                    shares[system][number],
                    None if paper is None else exactly(paper),
                    "share",
                    _EXPLANATION,
                    _checks(system, number, found),
                )
            )
    used = [shares[system][0] for system in _ORDER]
    return Findings(
        setup=(
            "OPT-13B on one A100-40GB (15,700 slots), lengths with ShareGPT's published means, "
            f"2 requests/s for {seconds / 60:g} minutes. Means over the time in which a step "
            "runs; slots that are free while nobody waits are left out."
        ),
        rows=rows,
        claims=[
            Claim(
                "the better the guess at the length, the less is wasted, and paging wastes least",
                all(a < b for a, b in pairwise(used)),
                " < ".join(f"{share:.1%}" for share in used),
            )
        ],
        panels=[
            Panel(
                title=name,
                x_label="",
                y_label="share of K/V slots",
                bars=[
                    Bars(kind, [values[system][number] for system in _ORDER])
                    for number, kind in enumerate(_KINDS)
                ],
                x_names=["Orca\n(Max)", "Orca\n(Pow2)", "Orca\n(Oracle)", last],
                stacked=True,
                y_limit=1.25,  # room for the legend
            )
            for name, last, values in (
                ("here", "Octavo", shares),
                ("the paper's figure 2", "vLLM", _paper_shares()),
            )
        ],
    )


def _shares(report: Report) -> tuple[float, ...]:
    kv = report.kv
    used = 1 - kv.free
    parts = (kv.token_states, kv.reserved, kv.internal, kv.external)
    return tuple(part / used for part in parts) if used else (0.0,) * len(parts)


def _paper_shares() -> dict[str, tuple[float, ...]]:
    shares = {system: tuple(part or 0.0 for part in _PAPER[system]) for system in _ORDER}
    shares[OURS] = (0.963, 0.0, 0.037, 0.0)
    return shares


def _checks(
    system: str, number: int, found: dict[tuple[str, float], tuple[float, ...]]
) -> list[Check]:
    return [Check(found[system, sigma][number], f"sigma {sigma:g}") for sigma in _SIGMAS]


STUDY = Study(
    name="fig02",
    title="Where K/V memory is (figure 2)",
    question=(
        "Systems that reserve contiguous room for a request's longest possible output waste most "
        "of it. How much of the memory holds tokens, and what is the rest?"
    ),
    run=run,
)
