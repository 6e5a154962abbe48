"""Autoscaling by queue wait and block use, over a day that is made short."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from scheduler_svc.simulator import (
    PAPER_SETUPS,
    Autoscale,
    Report,
    Sample,
    SimRequest,
    SimulationConfig,
    simulate,
    workload,
)
from scheduler_svc.simulator.reports.beyond import PAGE, percent, seconds, slim
from scheduler_svc.simulator.reports.findings import Claim, Findings, Line, Panel, Table
from scheduler_svc.simulator.reports.study import Context, Study

_SETUP = "opt-175b"
_MEAN_RATE = 12.0
_SWING = 0.7
_BURST = (0.70, 0.76, 2.0)
"""From and to, as shares of the day, and the factor on the rate."""
_MAX_EXECUTORS = 8
_ALWAYS = 4
_EARLIER = 0.6
_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Job:
    """How many executors: as many as at the start, or between two bounds."""

    name: str
    num_executors: int
    num_seconds: float
    seed: int
    autoscale: Autoscale | None = None


@dataclass(frozen=True, slots=True)
class _Found:
    report: Report
    share_late: float
    timeline: list[Sample]


def _rate(at: float, num_seconds: float) -> float:
    """Requests/s: low at night, high at noon, and a burst in the afternoon."""
    share = at / num_seconds
    rate = _MEAN_RATE * (1 - _SWING * math.cos(2 * math.pi * share))
    begin, end, factor = _BURST
    return rate * factor if begin <= share < end else rate


def _requests(num_seconds: float, seed: int) -> list[SimRequest]:
    """Thin a Poisson process of the highest rate."""
    draw = random.Random(seed)
    highest = _MEAN_RATE * (1 + _SWING) * _BURST[2]
    arrivals, now = [], 0.0
    while (now := now + draw.expovariate(highest)) < num_seconds:
        if draw.random() * highest < _rate(now, num_seconds):
            arrivals.append(now)
    drawn = workload.sharegpt(len(arrivals), rate=1.0, seed=seed)
    return [replace(r, arrival=at) for r, at in zip(drawn, arrivals, strict=True)]


def _run(job: _Job) -> _Found:
    config = SimulationConfig.of_setup(
        PAPER_SETUPS[_SETUP],
        num_executors=job.num_executors,
        autoscale=job.autoscale,
        sample_seconds=job.num_seconds / 100,
    )
    report = simulate(config, _requests(job.num_seconds, job.seed))
    table = report.requests
    late = sum(
        first - arrival > _PATIENCE_SECONDS
        for arrival, first in zip(table.arrival, table.first_token, strict=True)
    )
    return _Found(slim(report), late / max(1, len(table)), report.timeline)


def run(context: Context) -> Findings:
    """Serve the same day with many, with few, and with as many as the rule says, twice."""
    day = context.pick(600.0, 30.0)
    rule = _rule(day)
    jobs = _jobs(rule, day, context.seed)
    found = context.map(_run, jobs)
    scaled = found[2]
    return Findings(
        setup=_setup(rule, day),
        claims=_claims(found),
        tables=[_table(jobs, found)],
        panels=[
            _executors_panel(scaled, day),
            Panel(
                "Share of blocks in use",
                "seconds",
                "share",
                lines=_over_time(jobs, found, lambda sample: sample.block_use),
                y_limit=1.0,
                bound=rule.block_use,
            ),
            Panel(
                "Requests that wait",
                "seconds",
                "requests",
                lines=_over_time(jobs, found, lambda sample: float(sample.num_waiting)),
            ),
        ],
        notes=[_NOTE],
    )


def _rule(day: float) -> Autoscale:
    """Periods and starts that are as much of a short day as of a long one."""
    return Autoscale(
        min_executors=1,
        max_executors=_MAX_EXECUTORS,
        queue_wait_seconds=1.0,
        block_use=0.8,
        period_seconds=day / 90,
        start_seconds=day / 45,
        calm_seconds=day / 15,
    )


def _jobs(rule: Autoscale, day: float, seed: int) -> list[_Job]:
    """Many, few, by the rule, and by a rule that scales up earlier."""
    earlier = replace(rule, block_use=_EARLIER)
    return [
        _Job(f"{_MAX_EXECUTORS}, always", _MAX_EXECUTORS, day, seed),
        _Job(f"{_ALWAYS}, always", _ALWAYS, day, seed),
        _Job(f"rule, {rule.block_use:.0%} of blocks", 2, day, seed, rule),
        _Job(f"rule, {_EARLIER:.0%} of blocks", 2, day, seed, earlier),
    ]


def _setup(rule: Autoscale, day: float) -> str:
    return (
        f"{_SETUP} as in the paper on each executor; ShareGPT's lengths at "
        f"{_MEAN_RATE:g} requests/s in the mean over a day of {day:g} s, {1 - _SWING:.0%} of it "
        f"at night and {1 + _SWING:.0%} at noon, twice as many in a burst in the afternoon. The "
        "rule is that of Kubernetes' autoscaler for a queue wait of "
        f"{rule.queue_wait_seconds:g} s and {rule.block_use:.0%} of the blocks; it looks every "
        f"{rule.period_seconds:.3g} s, an executor takes {rule.start_seconds:.3g} s to start, "
        f"and goes after {rule.calm_seconds:.3g} s in which it was not wanted."
    )


def _claims(found: list[_Found]) -> list[Claim]:
    many, _, scaled, earlier = found
    used = scaled.report.mean_executors / many.report.mean_executors
    return [
        Claim(
            "Scaling by queue wait and block use takes at most three quarters of the "
            "executor-hours that the peak would need all day",
            used <= 0.75,
            f"{percent(used)}: {scaled.report.mean_executors:.2f} executors in the mean; "
            f"{earlier.report.mean_executors:.2f} at {_EARLIER:.0%} of the blocks",
        ),
        Claim(
            "Nobody is lost when executors go: every request ends with all its tokens",
            all(e.report.num_finished == e.report.num_requests for e in found),
            f"{scaled.report.num_finished:,} of {scaled.report.num_requests:,}; "
            f"{scaled.report.num_moved:,} were moved",
        ),
    ]


def _table(jobs: list[_Job], found: list[_Found]) -> Table:
    return Table(
        "One day",
        (
            "executors",
            "mean",
            "most",
            "TTFT p50, s",
            "TTFT p99, s",
            f"TTFT over {_PATIENCE_SECONDS:g} s",
            "normalized latency, s/token",
            "moved",
        ),
        [
            (
                job.name,
                f"{each.report.mean_executors:.2f}",
                f"{each.report.max_executors}",
                seconds(each.report.ttft.p50),
                seconds(each.report.ttft.p99),
                percent(each.share_late),
                f"{each.report.normalized_latency.mean:.3f}",
                f"{each.report.num_moved:,}",
            )
            for job, each in zip(jobs, found, strict=True)
        ],
    )


def _executors_panel(scaled: _Found, day: float) -> Panel:
    return Panel(
        "Executors, and requests that came",
        "seconds",
        "executors; requests/s",
        lines=[
            Line(
                "executors",
                [s.seconds for s in scaled.timeline],
                [float(s.num_executors) for s in scaled.timeline],
            ),
            Line(
                "requests/s",
                [day * i / 100 for i in range(100)],
                [_rate(day * i / 100, day) for i in range(100)],
            ),
        ],
    )


def _over_time(
    jobs: list[_Job], found: list[_Found], value: Callable[[Sample], float]
) -> list[Line]:
    return [
        Line(job.name, [s.seconds for s in each.timeline], [value(s) for s in each.timeline])
        for job, each in zip(jobs, found, strict=True)
    ]


_NOTE = (
    "What the rule costs is the time that an executor takes to start: until then the queue "
    "grows. A lower target for the blocks starts them earlier. A day of 24 hours has the "
    "same shape with more time for each step of it, so the lag weighs less there."
)


STUDY = Study(
    name="beyond_autoscale",
    title="As many executors as are needed",
    question="If executors come and go by how long requests wait and how many blocks are in use, "
    "how many executor-hours does a day take, and what do requests notice?",
    run=run,
    page=PAGE,
)
