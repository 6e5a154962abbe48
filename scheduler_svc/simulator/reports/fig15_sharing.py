"""Figure 15: memory that is saved by sharing blocks."""

from __future__ import annotations

from itertools import pairwise

from scheduler_svc.simulator import Report
from scheduler_svc.simulator.beams import FITTED_OPENNESS
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
from scheduler_svc.simulator.reports.systems import ALPACA, NAMES, SHAREGPT, Job, Load, run_all

_PARALLEL, _BEAM = "parallel sampling", "beam search"
_WIDTHS = (2, 4, 6)
# The paper gives all of Alpaca's figures, and for ShareGPT the ends of the range.
_PAPER: dict[tuple[str, str], tuple[float | None, ...]] = {
    (ALPACA, _PARALLEL): (0.0609, 0.0853, 0.0979),
    (ALPACA, _BEAM): (0.3756, 0.5313, 0.5516),
    (SHAREGPT, _PARALLEL): (0.162, None, 0.305),
    (SHAREGPT, _BEAM): (0.443, None, 0.663),
}
_RATES = {ALPACA: 12.0, SHAREGPT: 1.2}
# What else is run: spread of lengths, and how often a step of a beam is open (beams.py).
_PLAIN = "as above"
_WAYS: dict[str, dict[str, tuple[float, float]]] = {
    _PARALLEL: {
        _PLAIN: (1.0, FITTED_OPENNESS),
        "sigma 0.5": (0.5, FITTED_OPENNESS),
        "sigma 1.3": (1.3, FITTED_OPENNESS),
    },
    _BEAM: {
        _PLAIN: (1.0, FITTED_OPENNESS),
        "sigma 0.5": (0.5, FITTED_OPENNESS),
        "one open step in 25": (1.0, 0.04),
    },
}
_EXPLANATIONS = {
    _PARALLEL: (
        "Only the prompt is shared, so the share depends on how lengths spread, which is not "
        "published: long outputs run longest, and share least. Sigma is 1.0 here."
    ),
    _BEAM: (
        "Beams share the more the more often the model is in doubt, as then one beam's second "
        f"choice takes another beam's place. Here it is in {FITTED_OPENNESS:.0%} of all steps, "
        "which is fitted to the paper's figures for Alpaca; on ShareGPT's long outputs OPT-13B "
        "would have to be surer. A small chat model's beams on the running service, at ShareGPT's "
        "means, save 50.9% (width 2) and 76.9% (width 6; [memory.md](../memory.md)), about as much "
        "as here."
    ),
}

_Key = tuple[str, str, int, str]


def run(context: Context) -> Findings:
    """Serve with 2, 4 and 6 samples and beams, and count blocks."""
    num_requests = {
        (ALPACA, _PARALLEL): context.pick(1500, 16),
        (SHAREGPT, _PARALLEL): context.pick(400, 5),
        # A step of a beam takes the core many times as long.
        (ALPACA, _BEAM): context.pick(400, 16),
        (SHAREGPT, _BEAM): context.pick(100, 5),
    }
    jobs: dict[_Key, Job] = {}
    for kind, how in _PAPER:
        for width in _WIDTHS:
            for way, (sigma, openness) in _WAYS[how].items():
                if context.small and way != _PLAIN:
                    continue
                rate = _RATES[kind] / width
                load = Load(
                    kind,
                    rate,
                    num_requests[kind, how] / rate,
                    context.seed,
                    sigma=sigma,
                    n=width if how == _PARALLEL else 1,
                    beam_width=width if how == _BEAM else 0,
                )
                changes = (("beam_openness", openness),)
                jobs[kind, how, width, way] = Job(load, changes=changes)
    found = run_all(context, jobs)
    rows = [
        Row(
            f"saved, {NAMES[kind]}, {how}, {'n' if how == _PARALLEL else 'width'} = {width}",
            found[kind, how, width, _PLAIN].saved_by_sharing,
            None if paper is None else exactly(paper),
            "share",
            _EXPLANATIONS[how],
            _checks(kind, how, width, found),
        )
        for (kind, how), figures in _PAPER.items()
        for width, paper in zip(_WIDTHS, figures, strict=True)
    ]
    return Findings(
        setup=(
            "OPT-13B on one A100-40GB, block size 16; "
            f"{num_requests[ALPACA, _PARALLEL]:,} requests with Alpaca's lengths and "
            f"{num_requests[SHAREGPT, _PARALLEL]:,} with ShareGPT's ({num_requests[ALPACA, _BEAM]} "
            f"and {num_requests[SHAREGPT, _BEAM]} beam searches), {_RATES[ALPACA]:g} and "
            f"{_RATES[SHAREGPT]:g} sequences arriving a second. Blocks saved ÷ blocks that "
            "there would be without sharing, mean over time."
        ),
        rows=rows,
        claims=[
            *(_growth(kind, how, found) for kind, how in _PAPER),
            *(_beams_save_more(kind, found) for kind in (ALPACA, SHAREGPT)),
        ],
        panels=[_panel(how, found) for how in (_PARALLEL, _BEAM)],
        notes=[
            "Which beams live is decided by drawn log-probabilities, as there is no model; the "
            "search is the core's."
        ],
    )


def _growth(kind: str, how: str, found: dict[_Key, Report]) -> Claim:
    shares = [found[kind, how, width, _PLAIN].saved_by_sharing for width in _WIDTHS]
    return Claim(
        f"{NAMES[kind]}, {how}: the wider, the more is saved",
        all(a < b for a, b in pairwise(shares)),
        " < ".join(f"{share:.1%}" for share in shares),
    )


def _beams_save_more(kind: str, found: dict[_Key, Report]) -> Claim:
    pairs = [
        tuple(found[kind, how, width, _PLAIN].saved_by_sharing for how in (_PARALLEL, _BEAM))
        for width in _WIDTHS
    ]
    return Claim(
        f"{NAMES[kind]}: beams share more than samples, whose outputs differ from the first token",
        all(samples < beams for samples, beams in pairs),
        ", ".join(f"{samples:.1%} < {beams:.1%}" for samples, beams in pairs),
    )


def _checks(kind: str, how: str, width: int, found: dict[_Key, Report]) -> list[Check]:
    return [
        Check(found[kind, how, width, way].saved_by_sharing, way)
        for way in _WAYS[how]
        if way != _PLAIN and (kind, how, width, way) in found
    ]


def _panel(how: str, found: dict[_Key, Report]) -> Panel:
    name = "n" if how == _PARALLEL else "width"
    kinds = (ALPACA, SHAREGPT)
    places = [(kind, index, width) for kind in kinds for index, width in enumerate(_WIDTHS)]
    return Panel(
        title=how,
        x_label=name,
        y_label="share of blocks saved",
        bars=[
            Bars(
                "here",
                [found[kind, how, width, _PLAIN].saved_by_sharing for kind, _, width in places],
            ),
            Bars("the paper", [_PAPER[kind, how][index] or 0.0 for kind, index, _ in places]),
        ],
        x_names=[
            f"{width}\n{NAMES[kind]}" if index == 1 else f"{width}" for kind, index, width in places
        ],
    )


STUDY = Study(
    name="fig15",
    title="Memory saved by sharing (figure 15)",
    question=(
        "Sequences that came from one prompt keep equal tokens once. What share of all blocks is "
        "saved, in parallel sampling and in beam search?"
    ),
    run=run,
)
