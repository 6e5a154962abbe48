"""Figure 14: parallel sampling and beam search."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from scheduler_svc.simulator import PAPER_SETUPS, Roofline
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
    ALPACA,
    LABELS,
    LATENCY_BOUND,
    ORACLE,
    ORCAS,
    OURS,
    SLOW_HOST,
    CurveJob,
    Job,
    Load,
    run_all,
    run_curves,
    search,
)

_BLOCK_SIZE = 16
_BASIC, _PARALLEL, _BEAM = "basic sampling", "parallel", "beam"
# (how, samples or beams): where the searches begin, for ours and each Orca.
_GUESSES = {
    (_BASIC, 1): (72.0, 45.0, 28.0, 6.2),
    (_PARALLEL, 2): (16.0, 10.0, 6.0, 1.8),
    (_PARALLEL, 4): (10.0, 5.5, 3.0, 0.6),
    (_PARALLEL, 6): (7.0, 3.7, 2.0, 0.5),
    (_BEAM, 2): (18.0, 10.0, 6.0, 1.8),
    (_BEAM, 4): (12.0, 5.5, 3.0, 0.6),
    (_BEAM, 6): (8.0, 3.7, 2.0, 0.5),
}
_PAPER = {(_BASIC, 1): 1.3, (_BEAM, 6): 2.3}

_BASIC_EXPLANATION = (
    "A larger batch gains most where a step's time hardly depends on it. Figure 13 suggests that "
    "in the paper's system each sequence cost 0.4 ms of host work in a step; here it is 0.01 ms."
)

_BEAM_EXPLANATION = (
    "Three things that the paper's system need not have shared with this model. A step takes 256 "
    "sequences at most, 42 searches with beams of 6, when memory would hold more. What beams share "
    "is read from memory once for each of them, when a device that computes them side by side has "
    "it in its cache. And a beam that continues another one has to copy all of its K/V where they "
    "are contiguous, which the paper names as a cost of the systems before, and is free for Orca "
    "here; how often that happens is counted in Octavo's own searches, which copy one block then."
)
_MANY = "up to 1,024 sequences in a step"
_READ_ONCE = "those and what beams share read once"
_COPIES = "all that and Orca's copies counted"

_Key = tuple[str, int]
_Curves = dict[tuple[_Key, str], Curve]


def run(context: Context) -> Findings:
    """Search for sustained rates with more and more samples, and beams."""
    seconds = context.pick(90.0, 2.0)
    keys = context.pick(list(_GUESSES), [(_BASIC, 1), (_PARALLEL, 2), (_BEAM, 2)])
    searches: dict[tuple[_Key, str], CurveJob] = {}
    for key in keys:
        how, width = key
        for system, guess in zip((OURS, *ORCAS), _GUESSES[key], strict=True):
            load = Load(
                ALPACA,
                guess,
                seconds,
                context.seed,
                n=width if how == _PARALLEL else 1,
                beam_width=width if how == _BEAM else 0,
            )
            searches[key, system] = search(context, Job(load, system=system))
    if not context.small:
        searches |= _variations(context, searches)
    curves = run_curves(context, searches)
    gains = {key: _gain(curves, key) for key in keys}
    return Findings(
        setup=(
            "OPT-13B on one A100-40GB, Alpaca's lengths, Poisson arrivals over "
            f"{seconds / 60:.2g} minutes; a rate is sustained while normalized latency stays "
            f"below {LATENCY_BOUND:g} s/token. Orca shares nothing between samples or beams."
        ),
        rows=[
            Row(
                f"rate over {LABELS[ORACLE]}, {_name(key)}",
                gains[key],
                exactly(_PAPER[key]) if key in _PAPER else None,
                "x",
                _BEAM_EXPLANATION if key[0] == _BEAM else _BASIC_EXPLANATION,
                _checks(key, curves),
            )
            for key in keys
        ],
        claims=[_growth(how, gains) for how in (_PARALLEL, _BEAM)],
        tables=[
            Table(
                "Sustained rates, requests/s",
                ("", *(LABELS[system] for system in (OURS, *ORCAS))),
                [
                    (
                        _name(key),
                        *(f"{curves[key, s].sustained:.3g}" for s in (OURS, *ORCAS)),
                    )
                    for key in keys
                ],
            )
        ],
        panels=[_panel(curves, key) for key in keys if key[0] != _BASIC],
    )


def _gain(curves: _Curves, key: _Key) -> float:
    return curves[key, OURS].sustained / curves[key, ORACLE].sustained


def _name(key: _Key) -> str:
    how, width = key
    if how == _BASIC:
        return _BASIC
    return f"{width} samples" if how == _PARALLEL else f"beams of {width}"


def _growth(how: str, gains: dict[_Key, float]) -> Claim:
    """The wider, the more is shared, the more is gained."""
    widths = [key for key in gains if key[0] in (_BASIC, how)]
    values = [gains[key] for key in widths]
    name = "samples" if how == _PARALLEL else "beams"
    return Claim(
        f"the gain over Oracle grows with the number of {name} (to within the 4% of a search)",
        all(a <= 1.04 * b for a, b in pairwise(values)) and values[-1] > values[0],
        ", ".join(f"{key[1]}: {times(gains[key])}" for key in widths),
    )


def _variations(
    context: Context, searches: dict[tuple[_Key, str], CurveJob]
) -> dict[tuple[_Key, str], CurveJob]:
    """What the explanations name, changed."""
    basic, beams = (_BASIC, 1), (_BEAM, 6)
    jobs: dict[tuple[_Key, str], Job] = {}
    for system in (OURS, ORACLE):
        plain = searches[basic, system].job
        load = replace(plain.load, rate=plain.load.rate / 2)
        jobs[basic, f"{system}, slow"] = replace(plain, load=load, device=SLOW_HOST)
    ours, oracle = (searches[beams, system].job for system in (OURS, ORACLE))
    saved, moved = _shares_of_beams(context, ours)
    setup = PAPER_SETUPS[ours.setup]
    cost = Roofline(setup.model, setup.device, setup.num_gpus, cached_read_share=saved)
    many = ("max_num_seqs", 1024)
    jobs[beams, _MANY] = replace(ours, changes=(many,))
    jobs[beams, _READ_ONCE] = replace(ours, changes=(many, ("cost", cost)))
    jobs[beams, _COPIES] = replace(oracle, changes=(("beam_copy_share", moved),))
    return {key: search(context, job, is_drawn=False) for key, job in jobs.items()}


def _shares_of_beams(context: Context, job: Job) -> tuple[float, float]:
    """Of blocks: those saved by sharing; of beams and steps: how often one continues another.

    Then it copies the block that both would write to, unless that was just filled.
    """
    (report,) = run_all(context, {job: job}).values()
    num_steps = sum(each.beam_width * each.num_output for each in job.load.requests())
    moved = report.num_copied_blocks * _BLOCK_SIZE / (_BLOCK_SIZE - 1) / num_steps
    return report.saved_by_sharing, moved


def _checks(key: _Key, curves: _Curves) -> list[Check]:
    if (key, f"{OURS}, slow") in curves:
        slow = curves[key, f"{OURS}, slow"].sustained / curves[key, f"{ORACLE}, slow"].sustained
        return [Check(slow, "0.4 ms")]
    if (key, _COPIES) not in curves:
        return []
    many, once = curves[key, _MANY].sustained, curves[key, _READ_ONCE].sustained
    oracle, copying = curves[key, ORACLE].sustained, curves[key, _COPIES].sustained
    return [
        Check(many / oracle, _MANY),
        Check(once / oracle, _READ_ONCE),
        Check(once / copying, _COPIES),
    ]


def _panel(curves: _Curves, key: _Key) -> Panel:
    return Panel(
        title=f"Alpaca, {_name(key)}",
        x_label="request rate, requests/s",
        y_label="normalized latency, s/token",
        lines=[
            Line(LABELS[system], curves[key, system].rates, curves[key, system].latencies)
            for system in (OURS, *ORCAS)
        ],
        y_limit=1.0,
        bound=LATENCY_BOUND,
    )


STUDY = Study(
    name="fig14",
    title="Parallel sampling and beam search (figure 14)",
    question=(
        "Samples of one prompt, and beams, can share its K/V, which contiguous memory cannot do. "
        "How much does the sustained rate gain by that?"
    ),
    run=run,
)
