"""Figure 12: normalized latency over request rate, one sample a request."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from scheduler_svc.simulator.reports.findings import (
    Check,
    Claim,
    Findings,
    Line,
    Panel,
    Row,
    Table,
    between,
    exactly,
    times,
)
from scheduler_svc.simulator.reports.rates import Curve
from scheduler_svc.simulator.reports.study import Context, Study
from scheduler_svc.simulator.reports.systems import (
    ALPACA,
    LABELS,
    LATENCY_BOUND,
    MAX,
    NAMES,
    ORACLE,
    OURS,
    SHAREGPT,
    SLOW_HOST,
    STATIC,
    SYSTEMS,
    CurveJob,
    Job,
    Load,
    run_curves,
    search,
)

# Where each search begins, requests/s: it only saves time.
_GUESSES = {
    ("opt-13b", SHAREGPT): (2.9, 1.65, 1.35, 1.0, 0.33),
    ("opt-66b", SHAREGPT): (1.8, 0.8, 0.61, 0.44, 0.23),
    ("opt-175b", SHAREGPT): (5.1, 3.7, 3.1, 2.55, 0.35),
    ("opt-13b", ALPACA): (66.0, 42.0, 26.0, 5.8, 1.9),
    ("opt-66b", ALPACA): (44.0, 22.0, 12.3, 2.5, 1.2),
    ("opt-175b", ALPACA): (46.0, 46.0, 44.0, 16.5, 1.9),
}
_SETUPS = ("opt-13b", "opt-66b", "opt-175b")
_FULL_NAMES = {"opt-13b": "OPT-13B", "opt-66b": "OPT-66B", "opt-175b": "OPT-175B"}
_SLOW_STEP = (("step_seconds", 0.100),)

_Key = tuple[str, str, str]
_Curves = dict[_Key, Curve]


@dataclass(frozen=True, slots=True)
class _Variation:
    """One thing that is changed, for all systems alike, to see what the ratios depend on."""

    name: str
    setup: str = "opt-13b"
    kind: str = SHAREGPT
    systems: tuple[str, ...] = (OURS, ORACLE, MAX, STATIC)
    sigma: float = 1.0
    device: tuple[tuple[str, float], ...] = ()
    duration_factor: float = 1.0


_NARROW = _Variation("lengths spread less, sigma 0.7", sigma=0.7)
_WIDE = _Variation("lengths spread more, sigma 1.3", sigma=1.3)
_LONG = _Variation("three times as long a trace", duration_factor=3.0)
_SLOW_SAMPLES = _Variation("0.4 ms of host work for each sequence in a step", device=SLOW_HOST)
_SLOW_STEPS = _Variation(
    "100 ms of host work a step instead of 3",
    setup="opt-175b",
    systems=(OURS, ORACLE, MAX),
    device=_SLOW_STEP,
)
_TOO_SHORT = "The small form, 20 s of arrivals, is too short for rates."
_VARIATIONS = (_NARROW, _WIDE, _LONG, _SLOW_SAMPLES, _SLOW_STEPS)

_Varied = dict[_Variation, dict[str, Curve]]


def run(context: Context) -> Findings:
    """Search for the rate that every system sustains, for each model and data set."""
    seconds = {SHAREGPT: context.pick(900.0, 20.0), ALPACA: context.pick(180.0, 4.0)}
    searches: dict[_Key, CurveJob] = {}
    for (setup, kind), guesses in _GUESSES.items():
        for system, guess in zip(SYSTEMS, guesses, strict=True):
            load = Load(kind, guess, seconds[kind], context.seed)
            searches[setup, kind, system] = search(context, Job(load, setup, system))
    if context.small:
        searches = {key: each for key, each in searches.items() if key[0] == "opt-13b"}
    curves = run_curves(context, searches)
    panels = [key for key in _GUESSES if (*key, OURS) in curves]
    best = max(panels, key=lambda key: _ratio(curves, key[0], key[1], STATIC))
    varied = {} if context.small else _vary(context, seconds, best)
    return Findings(
        setup=(
            "OPT-13B on one A100-40GB, OPT-66B on four, OPT-175B on eight A100-80GB; lengths "
            "with the published means of ShareGPT and Alpaca; Poisson arrivals over "
            f"{seconds[SHAREGPT] / 60:.3g} minutes (ShareGPT) and {seconds[ALPACA] / 60:.3g} "
            "(Alpaca). A rate is sustained while the mean of latency ÷ output tokens stays below "
            f"{LATENCY_BOUND:g} s."
        ),
        rows=_rows(curves, best, varied),
        claims=[*_order_claims(curves, panels), *_large_model_claim(curves)],
        tables=[_rate_table(curves, panels), *_variation_table(curves, varied)],
        panels=[_panel(curves, *key) for key in panels],
    )


def _vary(context: Context, seconds: dict[str, float], best: tuple[str, str]) -> _Varied:
    fast = _Variation(_SLOW_SAMPLES.name, *best, (OURS, STATIC), device=SLOW_HOST)
    searches: dict[tuple[_Variation, str], CurveJob] = {}
    for each in (*_VARIATIONS, fast):
        guesses = dict(zip(SYSTEMS, _GUESSES[each.setup, each.kind], strict=True))
        for system in each.systems:
            load = Load(
                each.kind,
                guesses[system],
                seconds[each.kind] * each.duration_factor,
                context.seed,
                sigma=each.sigma,
            )
            job = Job(load, each.setup, system, device=each.device)
            searches[each, system] = search(context, job, is_drawn=False)
    varied: _Varied = {}
    for (each, system), curve in run_curves(context, searches).items():
        varied.setdefault(each, {})[system] = curve
    return varied


# -- figures -----------------------------------------------------------------------


def _rows(curves: _Curves, best: tuple[str, str], varied: _Varied) -> list[Row]:
    rows = [
        Row(
            f"rate over {LABELS[other]}, {_FULL_NAMES[setup]}, ShareGPT",
            _ratio(curves, setup, SHAREGPT, other),
            paper,
            "x",
            *_explanation(setup, other, varied),
        )
        for other, paper in ((ORACLE, between(1.7, 2.7)), (MAX, between(2.7, 8.0)))
        for setup in _SETUPS
        if (setup, SHAREGPT, OURS) in curves
    ]
    rows.append(
        Row(
            f"rate over {LABELS[STATIC]}, the highest ({_FULL_NAMES[best[0]]}, {NAMES[best[1]]})",
            _ratio(curves, *best, STATIC),
            exactly(22.0),
            "x",
            *_static_explanation(varied),
        )
    )
    return rows


def _ratio(curves: _Curves, setup: str, kind: str, other: str) -> float:
    return curves[setup, kind, OURS].sustained / curves[setup, kind, other].sustained


def _varied_ratio(found: dict[str, Curve], other: str) -> float:
    return found[OURS].sustained / found[other].sustained


def _explanation(setup: str, other: str, varied: _Varied) -> tuple[str, list[Check]]:
    if not varied:
        return _TOO_SHORT, []
    if setup == "opt-175b":
        slow = varied[_SLOW_STEPS]
        why = (
            "Modelled steps are faster than the paper's system was on eight devices: its plot of "
            "this model ends at 2.5 requests/s. The faster a step is, the sooner arithmetic, which "
            f"a larger batch does not save, is the limit. With {_SLOW_STEPS.name}, for all, "
            f"Octavo sustains {slow[OURS].sustained:.2f} requests/s."
        )
        return why, [Check(_varied_ratio(slow, other), _SLOW_STEPS.name)]
    return "What this ratio depends on, by runs of OPT-13B on ShareGPT.", [
        Check(_varied_ratio(varied[each], other), each.name)
        for each in _VARIATIONS
        if each.setup == "opt-13b"
    ]


def _static_explanation(varied: _Varied) -> tuple[str, list[Check]]:
    found = [(each, curves) for each, curves in varied.items() if each.systems == (OURS, STATIC)]
    if not found:
        return _TOO_SHORT, []
    each, curves = found[0]
    why = (
        "Modelled steps are faster than those of the systems of 2023 with many sequences, which "
        f"only large batches have. With {each.name}, which explains figure 13, Octavo sustains "
        f"{curves[OURS].sustained:.3g} requests/s."
    )
    return why, [Check(_varied_ratio(curves, STATIC), each.name)]


def _order_claims(curves: _Curves, panels: list[tuple[str, str]]) -> list[Claim]:
    claims = []
    for setup, kind in panels:
        rates = [curves[setup, kind, system].sustained for system in SYSTEMS]
        claims.append(
            Claim(
                f"{_FULL_NAMES[setup]}, {NAMES[kind]}: Octavo sustains most, then Oracle, Pow2, "
                "Max, static batching (to within 3%)",
                all(a >= 0.97 * b for a, b in pairwise(rates)),
                " / ".join(f"{rate:.3g}" for rate in rates) + " req/s",
            )
        )
    return claims


def _large_model_claim(curves: _Curves) -> list[Claim]:
    if ("opt-175b", ALPACA, OURS) not in curves:
        return []
    large = _ratio(curves, "opt-175b", ALPACA, ORACLE)
    others = [_ratio(curves, setup, ALPACA, ORACLE) for setup in _SETUPS[:2]]
    return [
        Claim(
            "the gain over Oracle is smallest for OPT-175B on Alpaca, where memory is plenty and "
            "arithmetic is the limit (the paper's figure 12f)",
            large < min(others),
            f"{times(large)} against {times(others[0])} and {times(others[1])}",
        )
    ]


def _rate_table(curves: _Curves, panels: list[tuple[str, str]]) -> Table:
    return Table(
        "Sustained rates, requests/s",
        ("", *(LABELS[system] for system in SYSTEMS)),
        [
            (
                f"{_FULL_NAMES[setup]}, {NAMES[kind]}",
                *(f"{curves[setup, kind, system].sustained:.3g}" for system in SYSTEMS),
            )
            for setup, kind in panels
        ],
    )


def _variation_table(curves: _Curves, varied: _Varied) -> list[Table]:
    if not varied:
        return []
    others = (ORACLE, MAX, STATIC)
    rows: list[tuple[str, ...]] = []
    seen = set()
    for each, found in sorted(varied.items(), key=lambda item: item[0].setup):
        panel = (each.setup, each.kind)
        name = f"{_FULL_NAMES[each.setup]}, {NAMES[each.kind]}"
        if panel not in seen:
            seen.add(panel)
            plain = {system: curves[(*panel, system)] for system in SYSTEMS}
            rows.append((f"{name}: as above", *_cells(plain, others)))
        rows.append((f"{name}: {each.name}", *_cells(found, others)))
    header = ("", "Octavo, req/s", *(f"over {LABELS[system]}" for system in others))
    return [Table("What the ratios depend on", header, rows)]


def _cells(found: dict[str, Curve], others: tuple[str, ...]) -> tuple[str, ...]:
    ratios = (times(_varied_ratio(found, each)) if each in found else "" for each in others)
    return (f"{found[OURS].sustained:.3g}", *ratios)


def _panel(curves: _Curves, setup: str, kind: str) -> Panel:
    return Panel(
        title=f"{_FULL_NAMES[setup]}, {NAMES[kind]}",
        x_label="request rate, requests/s",
        y_label="normalized latency, s/token",
        lines=[
            Line(LABELS[system], curve.rates, curve.latencies)
            for system in SYSTEMS
            for curve in (curves[setup, kind, system],)
        ],
        y_limit=1.0,
        bound=LATENCY_BOUND,
    )


STUDY = Study(
    name="fig12",
    title="Latency over request rate (figure 12)",
    question=(
        "More requests at once means more requests per second, until memory is full. How much "
        "higher a rate does paging sustain, at the same latency, than reservation and than "
        "static batching?"
    ),
    run=run,
)
