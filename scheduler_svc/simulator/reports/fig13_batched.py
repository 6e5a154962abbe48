"""Figure 13: how many requests are batched, at rates that are too high for most."""

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
    Table,
    exactly,
)
from scheduler_svc.simulator.reports.study import Context, Study
from scheduler_svc.simulator.reports.systems import (
    ALPACA,
    LABELS,
    MAX,
    NAMES,
    ORACLE,
    OURS,
    POW2,
    SHAREGPT,
    SLOW_HOST,
    Job,
    Load,
    run_all,
)

_ORDER = (MAX, POW2, ORACLE, OURS)
_RATES = {SHAREGPT: 2.0, ALPACA: 30.0}
_PAPER = {
    SHAREGPT: {MAX: 7.00, POW2: 9.81, ORACLE: 13.62, OURS: 30.42},
    ALPACA: {MAX: 7.00, POW2: 43.24, ORACLE: 72.75, OURS: 132.44},
}
_AS_MODELLED = "as modelled"
_SLOW = "0.4 ms a sequence"
_NARROW = "0.4 ms, sigma 0.7"
_WAYS = {_AS_MODELLED: ((), 1.0), _SLOW: (SLOW_HOST, 1.0), _NARROW: (SLOW_HOST, 0.7)}

_EXPLANATION = (
    "Requests in flight are the rate times how long each takes, and steps are faster here (see the "
    "table), so that the queue is short or empty. By these figures of the paper, vLLM's steps took "
    "45 ms with 30 sequences and 75 ms with 132, as if each had cost 0.4 ms of host work. With "
    "that in the model instead of 0.01 ms the counts are about the paper's; how many fit into "
    "Orca's chunks then depends on how lengths spread."
)

_Found = dict[tuple[str, str, str], Report]


def run(context: Context) -> Findings:
    """Serve OPT-13B at the paper's two rates."""
    seconds = {SHAREGPT: context.pick(1200.0, 60.0), ALPACA: context.pick(240.0, 8.0)}
    jobs = {
        (kind, system, way): Job(
            Load(kind, rate, seconds[kind], context.seed, sigma=sigma),
            system=system,
            device=device,
        )
        for kind, rate in _RATES.items()
        for system in _ORDER
        for way, (device, sigma) in _WAYS.items()
    }
    found = run_all(context, jobs)
    claims = []
    for kind in _RATES:
        counts = [_count(found, kind, system, _SLOW) for system in _ORDER]
        claims.append(
            Claim(
                f"{NAMES[kind]}, with the host work of 2023: the less is reserved, the more "
                "requests are batched",
                all(a <= b for a, b in pairwise(counts)),
                " / ".join(f"{count:.1f}" for count in counts),
            )
        )
    return Findings(
        setup=(
            "OPT-13B on one A100-40GB; ShareGPT's lengths at 2 requests/s for "
            f"{seconds[SHAREGPT] / 60:g} minutes, Alpaca's at 30 for {seconds[ALPACA] / 60:.2g}. "
            "Requests that hold K/V while a step runs, mean over time."
        ),
        rows=[
            Row(
                f"{LABELS[system]}, {NAMES[kind]} at {_RATES[kind]:g} req/s",
                _count(found, kind, system, _AS_MODELLED),
                exactly(_PAPER[kind][system]),
                "requests",
                _EXPLANATION,
                _checks(kind, system, found),
            )
            for kind in _RATES
            for system in _ORDER
        ],
        claims=claims,
        tables=[_table(found)],
        panels=[
            Panel(
                title=f"{NAMES[kind]}, {_RATES[kind]:g} requests/s",
                x_label="",
                y_label="batched requests",
                bars=[
                    *(
                        Bars(
                            f"here, {way}",
                            [_count(found, kind, system, way) for system in _ORDER],
                        )
                        for way in (_AS_MODELLED, _SLOW)
                    ),
                    Bars("the paper", [_PAPER[kind][system] for system in _ORDER]),
                ],
                x_names=["Orca\n(Max)", "Orca\n(Pow2)", "Orca\n(Oracle)", "Octavo\nor vLLM"],
            )
            for kind in _RATES
        ],
    )


def _count(found: _Found, kind: str, system: str, way: str) -> float:
    return found[kind, system, way].mean_batched_requests


def _checks(kind: str, system: str, found: _Found) -> list[Check]:
    ways = {_SLOW: _SLOW}
    if system in {POW2, ORACLE}:
        ways[_NARROW] = _NARROW
    return [Check(_count(found, kind, system, way), name) for way, name in ways.items()]


def _table(found: _Found) -> Table:
    rows = []
    for kind in _RATES:
        for way in _WAYS:
            ours = found[kind, OURS, way]
            rows.append(
                (
                    f"{NAMES[kind]}, {way}",
                    *(f"{_count(found, kind, system, way):.1f}" for system in _ORDER),
                    f"{ours.busy_seconds / max(1, ours.num_steps) * 1000:.0f} ms",
                    f"{ours.queue_wait.mean:.1f} s",
                )
            )
    header = ("", *(LABELS[system] for system in _ORDER), "Octavo's steps", "and queue")
    return Table("Batched requests, by host work and spread of lengths", header, rows)


STUDY = Study(
    name="fig13",
    title="Requests batched (figure 13)",
    question=(
        "Memory that is not wasted holds more requests at once. How many, at a rate that is too "
        "high for systems that reserve?"
    ),
    run=run,
)
