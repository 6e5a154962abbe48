"""Figure 16: a prefix that all prompts share."""

from __future__ import annotations

from scheduler_svc.simulator.reports.findings import (
    Check,
    Claim,
    Findings,
    Line,
    Panel,
    Row,
    exactly,
    times,
)
from scheduler_svc.simulator.reports.rates import Curve
from scheduler_svc.simulator.reports.study import Context, Study
from scheduler_svc.simulator.reports.systems import (
    LABELS,
    LATENCY_BOUND,
    ORACLE,
    OURS,
    WMT,
    CurveJob,
    Job,
    Load,
    run_curves,
    search,
)

_PAPER = {1: 1.67, 5: 3.58}
_PREFIX_TOKENS = {1: 80, 5: 341}
_UNCACHED = "Octavo without its prefix cache"
_HOST_WORK = (0.2e-3, 0.4e-3)
_GUESSES = {
    1: {OURS: 75.0, _UNCACHED: 41.0, ORACLE: 39.0},
    5: {OURS: 49.0, _UNCACHED: 14.6, ORACLE: 14.5},
}


_EXPLANATION = (
    "With a prefix computed once batches are large, so it matters what each sequence costs in a "
    "step. That is 0.01 ms of host work here; figure 13 suggests 0.4 ms for the paper's system."
)


def run(context: Context) -> Findings:
    """Search for sustained rates after a short prefix and a long one."""
    seconds = context.pick(180.0, 4.0)
    curves = run_curves(context, _searches(context, seconds))
    gains = {shots: _gain(curves, shots, OURS, ORACLE) for shots in _GUESSES}
    return Findings(
        setup=(
            "LLaMA-13B on one A100-40GB; prompts of a translation task: a prefix of 80 tokens "
            "with one example or of 341 with five, then a sentence (means of 30 tokens in and "
            f"40 out, assumed). Poisson arrivals over {seconds / 60:.2g} minutes; a rate is "
            f"sustained while normalized latency stays below {LATENCY_BOUND:g} s/token."
        ),
        rows=[
            Row(
                f"rate over {LABELS[ORACLE]}, {_name(shots)}",
                gains[shots],
                exactly(_PAPER[shots]),
                "x",
                _EXPLANATION,
                _checks(shots, curves),
            )
            for shots in _GUESSES
        ],
        claims=[
            Claim(
                "the longer the shared prefix, the larger the gain",
                gains[5] > gains[1],
                f"{times(gains[1])}, {times(gains[5])}",
            ),
            *(
                Claim(
                    f"{_name(shots)}: of the gain, a part is sharing: without the prefix cache "
                    "the rate is lower",
                    _gain(curves, shots, OURS, _UNCACHED) > 1,
                    f"{times(_gain(curves, shots, OURS, _UNCACHED))} by sharing, "
                    f"{times(_gain(curves, shots, _UNCACHED, ORACLE))} by paging alone",
                )
                for shots in _GUESSES
            ),
        ],
        panels=[
            Panel(
                title=f"{_name(shots)}: {_PREFIX_TOKENS[shots]} tokens",
                x_label="request rate, requests/s",
                y_label="normalized latency, s/token",
                lines=[
                    Line(
                        LABELS.get(name, name),
                        curves[shots, name].rates,
                        curves[shots, name].latencies,
                    )
                    for name in guesses
                ],
                y_limit=1.0,
                bound=LATENCY_BOUND,
            )
            for shots, guesses in _GUESSES.items()
        ],
    )


def _searches(context: Context, seconds: float) -> dict[tuple[int, str], CurveJob]:
    """By examples and system; in full also with more host work, to check the explanation."""
    searches: dict[tuple[int, str], CurveJob] = {}
    for shots, guesses in _GUESSES.items():
        for name, guess in guesses.items():
            job = Job(
                Load(WMT, guess, seconds, context.seed, shots=shots),
                "llama-13b",
                ORACLE if name == ORACLE else OURS,
                (("prefix_cache", False),) if name == _UNCACHED else (),
            )
            searches[shots, name] = search(context, job)
    if not context.small:
        for shots, guesses in _GUESSES.items():
            for name in (OURS, ORACLE):
                for host in _HOST_WORK:
                    job = Job(
                        Load(WMT, guesses[name], seconds, context.seed, shots=shots),
                        "llama-13b",
                        name,
                        device=(("sequence_seconds", host),),
                    )
                    key = shots, f"{name}, {host * 1000:g} ms"
                    searches[key] = search(context, job, is_drawn=False)
    return searches


def _gain(curves: dict[tuple[int, str], Curve], shots: int, name: str, other: str) -> float:
    return curves[shots, name].sustained / curves[shots, other].sustained


def _name(shots: int) -> str:
    return "1 example" if shots == 1 else f"{shots} examples"


def _checks(shots: int, curves: dict[tuple[int, str], Curve]) -> list[Check]:
    return [
        Check(
            _gain(curves, shots, f"{OURS}, {name}", f"{ORACLE}, {name}"),
            f"{name} of host work a sequence",
        )
        for name in (f"{host * 1000:g} ms" for host in _HOST_WORK)
        if (shots, f"{OURS}, {name}") in curves
    ]


STUDY = Study(
    name="fig16",
    title="A shared prefix (figure 16)",
    question=(
        "If all prompts begin with the same instructions and examples, their K/V need to be "
        "computed and kept only once. What does that gain?"
    ),
    run=run,
)
