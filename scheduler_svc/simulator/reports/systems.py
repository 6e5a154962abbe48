"""The systems that are compared, and one run of one of them.

All have the same model, devices, K/V slots, step times and requests. Octavo's attention reads
K/V in blocks, by the paper's kernel; that of the others reads them contiguously.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from scheduler_svc.simulator import (
    PAPER_SETUPS,
    BaselineConfig,
    Report,
    RequestTable,
    SimRequest,
    SimulationConfig,
    simulate,
    simulate_orca,
    simulate_static,
    workload,
)
from scheduler_svc.simulator.reports.rates import LOW_POINTS, Curve, find_sustained
from scheduler_svc.simulator.reports.study import Context

_Key = TypeVar("_Key", bound=Hashable)

OURS, ORACLE, POW2, MAX, STATIC = "octavo", "orca-oracle", "orca-pow2", "orca-max", "static"
ORCAS = (ORACLE, POW2, MAX)
SYSTEMS = (OURS, *ORCAS, STATIC)
LABELS = {
    OURS: "Octavo",
    ORACLE: "Orca (Oracle)",
    POW2: "Orca (Pow2)",
    MAX: "Orca (Max)",
    STATIC: "static batching",
}
SHAREGPT, ALPACA, WMT, CHAT = "sharegpt", "alpaca", "wmt", "chat"
NAMES = {SHAREGPT: "ShareGPT", ALPACA: "Alpaca", WMT: "WMT16 En-De", CHAT: "chat"}

LATENCY_BOUND = 0.5
"""Seconds a token at which a rate no longer counts as sustained: the middle of the paper's
plots, which end at 1. The curves are steep there."""

_SMALL_BOUND = 0.06
"""The same for the small form, whose arrivals end before a queue is long."""

SLOW_HOST = (("sequence_seconds", 0.4e-3),)
"""Host work of a step for each sequence in it, as the paper's figure 13 suggests that it was: 30.42
requests at 2 a second of 338 tokens are steps of 45 ms, and 132.44 at 30 of 58 are steps of 75 ms.
The modelled devices have 0.01 ms."""

_MIN_REQUESTS = 24


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to draw.

    Attributes:
        kind: of `NAMES`.
        rate: requests/s.
        seconds: of arrivals; so many requests are drawn as come in that time in the mean,
            and at least 24.
        seed: of lengths and arrivals. A longer trace begins with the shorter one.
        n: samples of each.
        beam_width: of each; 0 is sampling.
        sigma: spread of the logarithm of lengths (ShareGPT and Alpaca).
        shots: examples in the shared prefix (WMT).
        lengths: real (prompt, output) tokens to take in turn, instead of drawn ones.
    """

    kind: str
    rate: float
    seconds: float
    seed: int
    n: int = 1
    beam_width: int = 0
    sigma: float = 1.0
    shots: int = 1
    lengths: tuple[tuple[int, int], ...] = ()

    def requests(self) -> list[SimRequest]:
        """Draw them."""
        num = max(_MIN_REQUESTS, math.ceil(self.rate * self.seconds))
        if self.lengths:
            taken = [self.lengths[index % len(self.lengths)] for index in range(num)]
            drawn = [SimRequest(0.0, *each, n=self.n) for each in taken]
            return workload.at_rate(drawn, self.rate, self.seed)
        if self.kind == WMT:
            return workload.wmt(num, rate=self.rate, seed=self.seed, shots=self.shots)
        if self.kind == CHAT:
            return workload.chat(num, rate=self.rate, seed=self.seed)
        draw = {SHAREGPT: workload.sharegpt, ALPACA: workload.alpaca}[self.kind]
        return draw(
            num,
            rate=self.rate,
            seed=self.seed,
            sigma=self.sigma,
            n=self.n,
            beam_width=self.beam_width,
        )


@dataclass(frozen=True, slots=True)
class Job:
    """One system with its load.

    Attributes:
        load: what it serves.
        setup: of `PAPER_SETUPS`.
        system: of `SYSTEMS`.
        changes: of its configuration, by name.
        device: changes of the device, by name: other times, for all systems alike.
    """

    load: Load
    setup: str = "opt-13b"
    system: str = OURS
    changes: tuple[tuple[str, Any], ...] = ()
    device: tuple[tuple[str, float], ...] = ()


def run(job: Job) -> Report:
    """Run it; the report comes without its tables, which are long."""
    setup, changes = PAPER_SETUPS[job.setup], dict(job.changes)
    if job.device:
        times: dict[str, Any] = dict(job.device)
        setup = replace(setup, device=replace(setup.device, **times))
    requests = job.load.requests()
    if job.system == OURS:
        report = simulate(SimulationConfig.of_setup(setup, **changes), requests)
    elif job.system == STATIC:
        report = simulate_static(BaselineConfig.of_setup(setup, **changes), requests)
    else:
        reserve = job.system.removeprefix("orca-")
        report = simulate_orca(BaselineConfig.of_setup(setup, reserve=reserve, **changes), requests)
    return replace(report, requests=RequestTable(), timeline=[])


@dataclass(frozen=True, slots=True)
class CurveJob:
    """A search for the rate that a system sustains.

    Attributes:
        job: its load's rate is where the search begins.
        bound: seconds a token.
        precision: of the rate, relative.
        low_points: shares of the sustained rate that are measured for the curve.
    """

    job: Job
    bound: float = LATENCY_BOUND
    precision: float = 0.03
    low_points: tuple[float, ...] = LOW_POINTS


def search(context: Context, job: Job, *, is_drawn: bool = True) -> CurveJob:
    """Say how to search: for a curve that is drawn, or a figure; or short, in the small form."""
    if context.small:
        return CurveJob(job, bound=_SMALL_BOUND, precision=0.5, low_points=())
    if is_drawn:
        return CurveJob(job)
    return CurveJob(job, precision=0.05, low_points=())


def run_curve(search: CurveJob) -> Curve:
    """Search."""
    return find_sustained(
        partial(_latency, search.job),
        guess=search.job.load.rate,
        bound=search.bound,
        precision=search.precision,
        low_points=search.low_points,
    )


def _latency(job: Job, rate: float) -> float:
    load = replace(job.load, rate=rate)
    return run(replace(job, load=load)).normalized_latency.mean


def run_all(context: Context, jobs: Mapping[_Key, Job]) -> dict[_Key, Report]:
    """Run jobs, in as many processes as there are."""
    return dict(zip(jobs, context.map(run, jobs.values()), strict=True))


def run_curves(context: Context, searches: Mapping[_Key, CurveJob]) -> dict[_Key, Curve]:
    """Search for sustained rates, in as many processes as there are."""
    return dict(zip(searches, context.map(run_curve, searches.values()), strict=True))
