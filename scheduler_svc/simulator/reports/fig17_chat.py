"""Figure 17: a chatbot, whose prompts are long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_svc.simulator import PAPER_SETUPS, Roofline, traces, workload
from scheduler_svc.simulator.reports.findings import (
    Check,
    Claim,
    Findings,
    Line,
    Panel,
    Row,
    Table,
    exactly,
    times,
)
from scheduler_svc.simulator.reports.rates import Curve
from scheduler_svc.simulator.reports.study import Context, Study
from scheduler_svc.simulator.reports.systems import (
    CHAT,
    LABELS,
    LATENCY_BOUND,
    MAX,
    ORCAS,
    OURS,
    CurveJob,
    Job,
    Load,
    run_all,
    run_curves,
    search,
)

_GUESSES = {OURS: 1.18, ORCAS[0]: 0.9, ORCAS[1]: 0.89, ORCAS[2]: 0.865}
_TRACE = "len_sharegpt8k.csv.gz"
_MAX_TOKENS = 1024
_MAX_LENGTHS = 4000


def run(context: Context) -> Findings:
    """Search for sustained rates with drawn lengths."""
    return _run(
        context,
        (),
        "the last 1,024 tokens of drawn histories (mean 2,340 and median 1,730, as those of "
        "ShareGPT's conversations) and outputs of 1,024 tokens at most",
    )


def run_with_real_lengths(context: Context) -> Findings:
    """The same with the lengths of real conversations."""
    assert context.traces is not None, "the study needs traces"
    lengths = read_lengths(context.traces / _TRACE)
    return _run(
        context,
        lengths,
        f"the first {len(lengths):,} turns of ShareGPT's conversations with their history "
        f"({_TRACE}): the last 1,024 tokens, and outputs of 1,024 tokens at most",
    )


def read_lengths(path: Path) -> tuple[tuple[int, int], ...]:
    """Read turns' lengths, cut as the paper cut them."""
    return tuple(
        (min(_MAX_TOKENS, each.num_prompt), min(_MAX_TOKENS - 1, each.num_output))
        for each in traces.read(path, max_requests=_MAX_LENGTHS)
    )


@dataclass(frozen=True, slots=True)
class _Variation:
    """One thing that is changed, for all systems alike."""

    name: str
    device: tuple[tuple[str, float], ...] = ()
    is_contiguous: bool = False
    max_prompt: int = _MAX_TOKENS


_VARIATIONS = (
    _Variation("attention over blocks that costs no more than contiguous", is_contiguous=True),
    _Variation("100 ms of host work a step", device=(("step_seconds", 0.1),)),
    _Variation("prompts of 512 tokens at most", max_prompt=512),
    _Variation(
        "both 100 ms of host work and such prompts",
        device=(("step_seconds", 0.1),),
        max_prompt=512,
    ),
)
_PLAIN = _Variation("as above")
_EXPLANATION = (
    "Octavo's steps hold more K/V, which attention has to read, and prompts take their share of "
    "arithmetic in either system; a fast step gains less by a larger batch. And at these lengths "
    "fewer than twice as many sequences fit."
)

_Curves = dict[tuple[_Variation, str], Curve]


def _run(context: Context, lengths: tuple[tuple[int, int], ...], what: str) -> Findings:
    seconds = context.pick(900.0, 40.0)
    searches = {(_PLAIN, system): _search(context, _PLAIN, system, lengths) for system in _GUESSES}
    if not context.small:
        for each in _VARIATIONS:
            for system in (OURS, MAX):
                searches[each, system] = _search(context, each, system, lengths)
    curves = run_curves(context, searches)
    plain = {system: curves[_PLAIN, system] for system in _GUESSES}
    batched = run_all(
        context,
        {
            system: Job(
                Load(CHAT, 2 * _GUESSES[OURS], seconds / 3, context.seed, lengths=lengths),
                system=system,
            )
            for system in (OURS, MAX)
        },
    )
    counts = {system: report.mean_batched_requests for system, report in batched.items()}
    orcas = [plain[system].sustained for system in ORCAS]
    return Findings(
        setup=(
            f"OPT-13B on one A100-40GB; {what}. Nothing is kept between turns, as in the paper. "
            f"Poisson arrivals over {seconds / 60:.2g} minutes; a rate is sustained while "
            f"normalized latency stays below {LATENCY_BOUND:g} s/token."
        ),
        rows=[
            Row(
                f"rate over {LABELS[system]}",
                plain[OURS].sustained / plain[system].sustained,
                exactly(2.0),
                "x",
                f"{_EXPLANATION} Overloaded, Octavo batches {counts[OURS]:.1f} requests and Orca "
                f"(Max) {counts[MAX]:.1f}. The three differ little; what is checked is Orca (Max).",
                _checks(curves),
            )
            for system in ORCAS
        ],
        claims=[
            Claim(
                "knowing the output's length helps Orca little here",
                max(orcas) < 1.35 * min(orcas),
                " / ".join(
                    f"{LABELS[system]} {plain[system].sustained:.3g} req/s" for system in ORCAS
                ),
            ),
            Claim(
                "paging sustains a higher rate than each of them",
                plain[OURS].sustained > max(orcas),
                f"{plain[OURS].sustained:.3g} against {max(orcas):.3g} req/s",
            ),
        ],
        tables=[
            Table(
                "Sustained rates, requests/s",
                tuple(LABELS[system] for system in plain),
                [tuple(f"{curve.sustained:.3g}" for curve in plain.values())],
            ),
            *_variation_table(curves),
        ],
        panels=[
            Panel(
                title="chat, OPT-13B",
                x_label="request rate, requests/s",
                y_label="normalized latency, s/token",
                lines=[
                    Line(LABELS[system], curve.rates, curve.latencies)
                    for system, curve in plain.items()
                ],
                y_limit=1.0,
                bound=LATENCY_BOUND,
            )
        ],
    )


def _search(
    context: Context, each: _Variation, system: str, lengths: tuple[tuple[int, int], ...]
) -> CurveJob:
    seconds = context.pick(900.0, 40.0)
    changes: tuple[tuple[str, Any], ...] = ()
    if each.is_contiguous and system == OURS:
        setup = PAPER_SETUPS["opt-13b"]
        changes = (("cost", Roofline(setup.model, setup.device, block_overhead_tokens=0.0)),)
    if each.max_prompt < _MAX_TOKENS:
        turns = workload.chat(_MAX_LENGTHS, rate=1.0, seed=context.seed)
        drawn = lengths or tuple((turn.num_prompt, turn.num_output) for turn in turns)
        lengths = tuple((min(each.max_prompt, prompt), output) for prompt, output in drawn)
    guess = _GUESSES[system] / (3 if each.device else 1)
    load = Load(CHAT, guess, seconds, context.seed, lengths=lengths)
    job = Job(load, system=system, changes=changes, device=each.device)
    return search(context, job, is_drawn=each == _PLAIN)


def _checks(curves: _Curves) -> list[Check]:
    return [
        Check(curves[each, OURS].sustained / curves[each, MAX].sustained, each.name)
        for each in _VARIATIONS
        if (each, OURS) in curves
    ]


def _variation_table(curves: _Curves) -> list[Table]:
    rows = [
        (
            each.name,
            f"{curves[each, OURS].sustained:.3g}",
            f"{curves[each, MAX].sustained:.3g}",
            times(curves[each, OURS].sustained / curves[each, MAX].sustained),
        )
        for each in (_PLAIN, *_VARIATIONS)
        if (each, OURS) in curves
    ]
    header = ("", "Octavo, req/s", "Orca (Max)", "ratio")
    return [Table("What the ratio depends on", header, rows)] if len(rows) > 1 else []


_QUESTION = (
    "A chatbot's prompt is the conversation so far, so prompts are long, and room reserved beside "
    "them fills the memory. How much higher a rate does paging sustain?"
)

STUDIES = (
    Study(name="fig17", title="Chat (figure 17)", question=_QUESTION, run=run),
    Study(
        name="fig17_real",
        title="Chat, with the lengths of real conversations (figure 17)",
        question=_QUESTION,
        run=run_with_real_lengths,
        needs_traces=True,
    ),
)
