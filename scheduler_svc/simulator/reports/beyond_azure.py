"""The paper's comparison of rates once more, on lengths that a service recorded."""

from __future__ import annotations

from scheduler_svc.simulator import traces
from scheduler_svc.simulator.reports.beyond import PAGE
from scheduler_svc.simulator.reports.findings import Claim, Findings, Line, Panel, Row
from scheduler_svc.simulator.reports.rates import Curve
from scheduler_svc.simulator.reports.study import Context, Study
from scheduler_svc.simulator.reports.systems import (
    LABELS,
    LATENCY_BOUND,
    MAX,
    ORACLE,
    OURS,
    SHAREGPT,
    CurveJob,
    Job,
    Load,
    run_curves,
)

_FILE = "azure2023_conv.csv.gz"
_MAX_LEN = 2048
_SHAREGPT_MEANS = (161.31, 337.99)
_SETUPS = ("opt-13b", "opt-175b")
_SYSTEMS = (OURS, ORACLE, MAX)
_Key = tuple[str, str]
"""Setup and system."""
_GUESSES = {
    ("opt-13b", OURS): 0.6,
    ("opt-13b", ORACLE): 0.4,
    ("opt-13b", MAX): 0.3,
    ("opt-175b", OURS): 2.0,
    ("opt-175b", ORACLE): 1.2,
    ("opt-175b", MAX): 0.9,
}


def run(context: Context) -> Findings:
    """Search for the rates that each system sustains."""
    assert context.traces is not None
    rows = traces.read(context.traces / _FILE, context.pick(5_000, 400))
    fitting = [r for r in rows if r.num_prompt + r.num_output < _MAX_LEN]
    lengths = tuple((r.num_prompt, r.num_output) for r in fitting)
    setups = context.pick(_SETUPS, _SETUPS[:1])
    num_seconds = context.pick(600.0, 60.0)
    curves = run_curves(context, _searches(context, setups, lengths, num_seconds))
    mean_in = sum(a for a, _ in lengths) / len(lengths)
    mean_out = sum(b for _, b in lengths) / len(lengths)
    return Findings(
        setup=f"Lengths of the first {len(rows):,} conversations of Azure's trace of 2023; as in "
        f"the paper those of {_MAX_LEN:,} tokens or more are dropped ({len(lengths):,} are left: "
        f"{mean_in:.0f} tokens in and {mean_out:.0f} out in the mean), and arrivals are a Poisson "
        f"process, {num_seconds:g} s of it. The paper's models and devices. A rate is sustained "
        f"while the mean normalized latency is below {LATENCY_BOUND:g} s a token.",
        rows=_rows(setups, curves),
        claims=[_claim(setups, curves)],
        panels=[_panel(setup, curves) for setup in setups],
        notes=[
            f"Prompts are {mean_in / _SHAREGPT_MEANS[0]:.1f} times as long as ShareGPT's and "
            f"outputs {mean_out / _SHAREGPT_MEANS[1]:.2f} times, so there is less to gain: a "
            "request fills more of the room that Max keeps for it, only outputs are reserved by "
            "Oracle before they are there, and prefill, which no allocator makes shorter, takes "
            "more of the time.",
        ],
    )


def _searches(
    context: Context,
    setups: tuple[str, ...],
    lengths: tuple[tuple[int, int], ...],
    num_seconds: float,
) -> dict[_Key, CurveJob]:
    """Look for the sustained rate of every system on every setup."""
    return {
        (setup, system): CurveJob(
            Job(
                Load(SHAREGPT, _GUESSES[setup, system], num_seconds, context.seed, lengths=lengths),
                setup,
                system,
            ),
            precision=context.pick(0.03, 0.3),
            low_points=context.pick((0.3, 0.6, 0.85), ()),
        )
        for setup in setups
        for system in _SYSTEMS
    }


def _rows(setups: tuple[str, ...], curves: dict[_Key, Curve]) -> list[Row]:
    return [
        Row(
            f"sustained rate, {setup}, Octavo over {LABELS[system]}",
            curves[setup, OURS].sustained / curves[setup, system].sustained,
            None,
            "x",
        )
        for setup in setups
        for system in (ORACLE, MAX)
    ]


def _claim(setups: tuple[str, ...], curves: dict[_Key, Curve]) -> Claim:
    return Claim(
        "The order of the paper holds on recorded lengths: paged over Oracle over Max",
        all(
            curves[setup, OURS].sustained
            > curves[setup, ORACLE].sustained
            > curves[setup, MAX].sustained
            for setup in setups
        ),
        "; ".join(
            f"{setup}: "
            + ", ".join(f"{curves[setup, s].sustained:.2f} {LABELS[s]}" for s in _SYSTEMS)
            + " requests/s"
            for setup in setups
        ),
    )


def _panel(setup: str, curves: dict[_Key, Curve]) -> Panel:
    return Panel(
        f"{setup}, Azure's conversations",
        "requests/s",
        "normalized latency, s/token",
        lines=[
            Line(LABELS[s], curves[setup, s].rates, curves[setup, s].latencies) for s in _SYSTEMS
        ],
        y_limit=1.0,
        bound=LATENCY_BOUND,
    )


STUDY = Study(
    name="beyond_azure",
    title="The paper's rates on a recorded workload",
    question="The paper's workloads are not public as it used them. Does its comparison hold on "
    "the lengths of conversations that a public service recorded?",
    run=run,
    page=PAGE,
    needs_traces=True,
)
