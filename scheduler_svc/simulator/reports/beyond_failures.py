"""Deaths of executors: what they cost those who were there, and everybody else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler_svc.simulator import (
    DEVICES,
    MODELS,
    Failures,
    Report,
    SimulationConfig,
    simulate,
    workload,
)
from scheduler_svc.simulator.reports.beyond import (
    PAGE,
    own_roofline,
    percent,
    quantile,
    seconds,
    slim,
)
from scheduler_svc.simulator.reports.findings import Claim, Findings, Line, Panel, Table
from scheduler_svc.simulator.reports.study import Context, Study

_MODEL, _DEVICE, _NUM_GPUS = "llama-3.1-70b", "a100-80gb", 4
_NUM_EXECUTORS = 8
_RATE_EACH = 2.5
_DOWN_SECONDS, _DETECT_SECONDS = 60.0, 5.0
_PER_HOUR = 0.01
_FLEET = 1_000
_NOTICEABLE_SECONDS = 1.0
_NAMES = ("none", f"noticed after {_DETECT_SECONDS:g} s", "noticed at once")


@dataclass(frozen=True, slots=True)
class _Job:
    """Deaths at these times, or none."""

    deaths: tuple[tuple[float, int], ...]
    num_seconds: float
    seed: int
    detect_seconds: float = _DETECT_SECONDS


@dataclass(frozen=True, slots=True)
class _Found:
    """Figures, and the latency of every request in their order."""

    report: Report
    e2e: list[float]


def _run(job: _Job) -> _Found:
    rate = _RATE_EACH * _NUM_EXECUTORS
    config = SimulationConfig.of_machine(
        MODELS[_MODEL],
        DEVICES[_DEVICE],
        _NUM_GPUS,
        cost=own_roofline(_MODEL, _DEVICE, _NUM_GPUS),
        num_executors=_NUM_EXECUTORS,
        failures=Failures(
            down_seconds=_DOWN_SECONDS, detect_seconds=job.detect_seconds, at=job.deaths
        ),
    )
    report = simulate(
        config, workload.sharegpt(round(rate * job.num_seconds), rate=rate, seed=job.seed)
    )
    table = report.requests
    e2e = [end - begin for begin, end in zip(table.arrival, table.end, strict=True)]
    return _Found(slim(report), e2e)


def run(context: Context) -> Findings:
    """Serve the same requests without deaths, with deaths, and with deaths noticed at once."""
    num_seconds = context.pick(240.0, 24.0)
    count = context.pick(3, 1)
    deaths = tuple((num_seconds * (i + 0.5) / count, i % _NUM_EXECUTORS) for i in range(count))
    jobs = [
        _Job((), num_seconds, context.seed),
        _Job(deaths, num_seconds, context.seed),
        _Job(deaths, num_seconds, context.seed, detect_seconds=0.0),
    ]
    calm, hung, crashed = context.map(_run, jobs)
    cost = _Cost(calm, hung, count)
    return Findings(
        setup=f"{_NUM_EXECUTORS} executors of {_MODEL} on {_NUM_GPUS} x {_DEVICE} each, ShareGPT's "
        f"lengths at {_RATE_EACH:g} requests/s each for {num_seconds:g} s, {count} deaths, each "
        f"for {_DOWN_SECONDS:g} s. A crash breaks the stream and is noticed at once; a hang is "
        f"noticed when a step is {_DETECT_SECONDS:g} s late.",
        claims=_claims(calm, hung, crashed, cost),
        tables=[_runs_table(calm, hung, crashed), _death_table(cost)],
        panels=[
            Panel(
                "Requests that end later than without deaths",
                "seconds later",
                "share of all requests, that much or more",
                lines=[
                    _tail(_NAMES[1], cost.delays),
                    _tail(_NAMES[2], _delays(calm, crashed)),
                ],
                log_y=True,
            )
        ],
        notes=[
            "Requests on the dead executor go on on another one, with the tokens that they have: "
            "prompt and output are computed again there, in one prefill, and the stream goes on. "
            "Others are later because the rest of the fleet has that work and more requests each.",
            "Deaths are far more frequent here than 1% an hour, so that there are some; the table "
            "scales what one costs.",
        ],
    )


class _Cost:
    """What one death costs, and deaths of a large fleet in an hour.

    Attributes:
        again: tokens computed again for each death.
        share_again: of all tokens, at `_PER_HOUR`.
        delays: of all requests, seconds later than without deaths, the least first.
        noticed: those that somebody would notice.
        num_noticed: requests of these for each death.
        share_noticed: of all requests, at `_PER_HOUR`.
    """

    def __init__(self, calm: _Found, hung: _Found, count: int) -> None:
        """Compare a run without deaths to one with so many."""
        extra = hung.report.num_computed_tokens - calm.report.num_computed_tokens
        per_executor = calm.report.output_tokens_per_second / _NUM_EXECUTORS
        self.again = extra / count
        self.share_again = _PER_HOUR * _FLEET * self.again / (_FLEET * per_executor * 3600)
        self.delays = _delays(calm, hung)
        self.noticed = [each for each in self.delays if each > _NOTICEABLE_SECONDS]
        self.num_noticed = len(self.noticed) / count
        self.share_noticed = _PER_HOUR * len(self.noticed) / count / (_RATE_EACH * 3600)


def _claims(calm: _Found, hung: _Found, crashed: _Found, cost: _Cost) -> list[Claim]:
    whole = all(
        each.report.num_finished == each.report.num_requests
        and each.report.num_output_tokens == calm.report.num_output_tokens
        for each in (hung, crashed)
    )
    return [
        Claim(
            "Nothing is lost: every request ends with all its tokens",
            whole,
            f"{hung.report.num_finished:,} requests and "
            f"{hung.report.num_output_tokens:,} tokens in each run",
        ),
        Claim(
            "At 1% of executors an hour less than one token in 10,000 is computed again",
            cost.share_again < 1e-4,
            f"{cost.again:,.0f} tokens per death; {percent(cost.share_again)} of all tokens",
        ),
    ]


def _runs_table(calm: _Found, hung: _Found, crashed: _Found) -> Table:
    computed_calm = calm.report.num_computed_tokens
    return Table(
        "With and without deaths",
        (
            "deaths",
            "e2e p50, s",
            "e2e p99, s",
            "TTFT p99, s",
            "ITL p99, s",
            "requests moved",
            "computed again",
        ),
        [
            (
                name,
                seconds(each.report.e2e.p50),
                seconds(each.report.e2e.p99),
                seconds(each.report.ttft.p99),
                seconds(each.report.itl.p99),
                f"{each.report.num_moved}",
                percent(each.report.num_computed_tokens / computed_calm - 1),
            )
            for name, each in zip(_NAMES, (calm, hung, crashed), strict=True)
        ],
    )


def _death_table(cost: _Cost) -> Table:
    return Table(
        f"One death, and {_PER_HOUR:.0%} of {_FLEET:,} executors an hour at this load",
        ("what", "per death", "per hour"),
        [
            ("deaths", "1", f"{_PER_HOUR * _FLEET:g}"),
            (
                "tokens computed again",
                f"{cost.again:,.0f}",
                f"{cost.again * _PER_HOUR * _FLEET:,.0f}",
            ),
            ("share of all tokens", "", percent(cost.share_again)),
            (
                f"requests more than {_NOTICEABLE_SECONDS:g} s later",
                f"{cost.num_noticed:.0f}",
                f"{cost.num_noticed * _PER_HOUR * _FLEET:,.0f}",
            ),
            ("share of all requests", "", percent(cost.share_noticed)),
            ("how much later, p50 of those", f"{quantile(cost.noticed, 0.5):.1f} s", ""),
            ("how much later, at worst", f"{max(cost.delays, default=0.0):.1f} s", ""),
        ],
    )


def _delays(calm: _Found, other: _Found) -> list[float]:
    found = (b - a for a, b in zip(calm.e2e, other.e2e, strict=True))
    return sorted(each for each in found if math.isfinite(each))


def _tail(label: str, delays: list[float]) -> Line:
    """Share of requests above each delay, at 200 points at most."""
    above = [each for each in delays if each > 0]
    picked = above[:: max(1, len(above) // 200)]
    num_all = max(1, len(delays))
    shares = [(len(above) - i * max(1, len(above) // 200)) / num_all for i in range(len(picked))]
    return Line(label, picked, shares)


STUDY = Study(
    name="beyond_failures",
    title="Executors that die",
    question="If one executor in a hundred dies every hour, how much work is done again, how many "
    "requests notice, and is any of them lost?",
    run=run,
    page=PAGE,
)
