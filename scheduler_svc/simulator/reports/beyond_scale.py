"""Scale: how many executors a scheduler keeps busy, and a fleet of a thousand."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.simulator import (
    DEVICES,
    MODELS,
    Failures,
    LinearCost,
    Report,
    SimRequest,
    SimulationConfig,
    simulate,
    workload,
)
from scheduler_svc.simulator.reports.beyond import PAGE, own_roofline, percent, seconds, slim
from scheduler_svc.simulator.reports.findings import (
    Claim,
    Findings,
    Line,
    Panel,
    Row,
    Table,
    at_least,
    exactly,
)
from scheduler_svc.simulator.reports.study import Context, Study

_STEP_SECONDS = 0.020
_SCHEDULER_SECONDS = 0.97 / (32 * 49.7)
"""Of a core: `octavo bench core --executors 32 --wire` (docs/performance.md)."""
"""CPU time of a step through engine and gRPC, as measured: `octavo bench core --running 64
--executors 32 --rate 50 --seconds 20 --wire` took 0.88 of a core (docs/performance.md)."""
_WIRE_SECONDS = 0.0005
_ROWS = 64
_BUSY = 0.98

_MODEL, _DEVICE = "llama-3.1-8b", "h200"
_THOUSANDTHS = 10
_RATE_EACH = 8.0


@dataclass(frozen=True, slots=True)
class _Job:
    num_executors: int
    num_schedulers: int
    num_tokens: int


def _run(job: _Job) -> Report:
    """Full rows everywhere, for so many tokens."""
    cost = LinearCost(
        "steps of 20 ms",
        {"fixed": _STEP_SECONDS},
        num_blocks=4096,
        max_num_seqs=_ROWS,
        max_num_batched_tokens=8192,
    )
    config = SimulationConfig.of_calibration(
        cost,
        num_executors=job.num_executors,
        num_schedulers=job.num_schedulers,
        scheduler_seconds=_SCHEDULER_SECONDS,
        wire_seconds=_WIRE_SECONDS,
        router="round-robin",
    )
    requests = [SimRequest(0.0, 32, job.num_tokens)] * (_ROWS * job.num_executors)
    return slim(simulate(config, requests))


def _busy(job: _Job, report: Report) -> float:
    """Share of the tokens/s that executors would make if none ever waited."""
    return report.output_tokens_per_second / (job.num_executors * _ROWS / _STEP_SECONDS)


def run_schedulers(context: Context) -> Findings:
    """Give one scheduler more and more executors, then share them among several."""
    sizes = context.pick((8, 16, 24, 32, 36, 40, 48, 64), (8, 48))
    shares = context.pick((1, 2, 4), (1, 2))
    num_tokens = context.pick(240, 40)
    most = sizes[-1]
    alone = [_Job(size, 1, num_tokens) for size in sizes]
    shared = [_Job(most, count, num_tokens) for count in shares]
    jobs = [*alone, *shared[1:]]
    found = dict(zip(jobs, context.map(_run, jobs), strict=True))
    return Findings(
        setup=f"Executors whose steps take {_STEP_SECONDS * 1e3:g} ms with {_ROWS} sequences each, "
        f"{1 / _STEP_SECONDS:g} steps/s; a scheduler process takes {_SCHEDULER_SECONDS * 1e6:.0f} "
        "us of one core for a step, as measured by `octavo bench core --executors 32 --wire`, and "
        "does one thing at a time; "
        f"{_WIRE_SECONDS * 1e3:g} ms one way.",
        reference="measured",
        rows=_schedulers_rows(found, alone, wanted=context.pick(32, 8)),
        claims=[_sharing_claim(found, shared)],
        tables=[_schedulers_table(found)],
        panels=[_alone_panel(found, alone), _shared_panel(found, shared)],
        notes=[
            "The second step in flight hides the scheduler until its CPU is used up; beyond that "
            "it is a plain bottleneck. Faster steps need more schedulers, larger batches fewer.",
        ],
    )


def _steps_per_second(job: _Job) -> float:
    """Steps that the executors would make if none ever waited."""
    return 1 / _STEP_SECONDS * job.num_executors


def _schedulers_rows(found: dict[_Job, Report], alone: list[_Job], wanted: int) -> list[Row]:
    """Compare one scheduler to what is wanted of it.

    Args:
        found: reports of all jobs.
        alone: jobs of one scheduler, that with the most executors last.
        wanted: executors that it should keep busy.
    """
    busy = [job.num_executors for job in alone if _busy(job, found[job]) >= _BUSY]
    last = alone[-1]
    return [
        Row(
            f"executors that one scheduler keeps at least {_BUSY:.0%} busy",
            max(busy, default=0),
            at_least(wanted),
        ),
        Row(
            "steps/s of one scheduler with too many executors",
            _busy(last, found[last]) * _steps_per_second(last),
            exactly(1 / _SCHEDULER_SECONDS),
            explanation="The reference is 1 ÷ the measured CPU time of a step, as if the "
            "scheduler never waited.",
        ),
    ]


def _sharing_claim(found: dict[_Job, Report], shared: list[_Job]) -> Claim:
    last = shared[-1]
    return Claim(
        f"Schedulers share executors without loss: {last.num_schedulers} of them keep "
        f"{last.num_executors} executors at least {_BUSY:.0%} busy",
        _busy(last, found[last]) >= _BUSY,
        ", ".join(f"{percent(_busy(job, found[job]))} with {job.num_schedulers}" for job in shared),
    )


def _schedulers_table(found: dict[_Job, Report]) -> Table:
    return Table(
        "Executors and schedulers",
        ("executors", "schedulers", "busy", "output tokens/s", "ITL p50, s", "ITL p99, s"),
        [
            (
                f"{job.num_executors}",
                f"{job.num_schedulers}",
                percent(_busy(job, report)),
                f"{report.output_tokens_per_second:,.0f}",
                seconds(report.itl.p50),
                seconds(report.itl.p99),
            )
            for job, report in found.items()
        ],
    )


def _alone_panel(found: dict[_Job, Report], alone: list[_Job]) -> Panel:
    sizes = [job.num_executors for job in alone]
    return Panel(
        "One scheduler",
        "executors",
        "share of time that executors work",
        lines=[
            Line("simulated", sizes, [_busy(job, found[job]) for job in alone]),
            Line(
                "CPU alone",
                sizes,
                [min(1.0, 1 / _SCHEDULER_SECONDS / _steps_per_second(job)) for job in alone],
            ),
        ],
        y_limit=1.05,
    )


def _shared_panel(found: dict[_Job, Report], shared: list[_Job]) -> Panel:
    return Panel(
        f"{shared[0].num_executors} executors",
        "schedulers",
        "share of time that executors work",
        lines=[
            Line(
                "simulated",
                [job.num_schedulers for job in shared],
                [_busy(job, found[job]) for job in shared],
            )
        ],
        y_limit=1.05,
    )


# -- a thousand --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fleet:
    num_executors: int
    num_requests: int
    seed: int


def _run_fleet(fleet: _Fleet) -> Report:
    rate = _RATE_EACH * fleet.num_executors
    config = SimulationConfig.of_machine(
        MODELS[_MODEL],
        DEVICES[_DEVICE],
        cost=own_roofline(_MODEL, _DEVICE),
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        num_executors=fleet.num_executors,
        num_schedulers=max(1, fleet.num_executors // 10),
        failures=Failures(per_executor_hour=0.01, down_seconds=60.0, detect_seconds=5.0),
        seed=fleet.seed,
    )
    requests = workload.sharegpt(fleet.num_requests, rate=rate, seed=fleet.seed)
    return slim(simulate(config, requests))


def run_thousand(context: Context) -> Findings:
    """A hundredth of a thousand executors with a hundredth of a million requests."""
    count = context.pick(_THOUSANDTHS, 2)
    num_requests = context.pick(10_000, 60)
    # Two halves, so that two processes can share them.
    halves = [_Fleet(count // 2, num_requests // 2, context.seed + i) for i in range(2)]
    reports = context.map(_run_fleet, halves)
    finished = sum(r.num_finished for r in reports)
    steps = sum(r.num_steps for r in reports)
    tokens = sum(r.num_output_tokens for r in reports)
    return Findings(
        setup=f"{count} executors of {_MODEL} on {_DEVICE} and {num_requests:,} requests with "
        f"ShareGPT's lengths at {_RATE_EACH:g} a second for each executor, in two halves; a "
        "scheduler for every ten; deaths at 1% of executors an hour. A hundredth of a thousand "
        "executors with a million requests, which is the same program with other numbers.",
        claims=[
            Claim(
                "Every request ends with all its tokens",
                finished == sum(r.num_requests for r in reports),
                f"{finished:,} requests, {tokens:,} output tokens, {steps:,} steps of the real "
                "scheduler core",
            )
        ],
        tables=[
            Table(
                "What was simulated",
                (
                    "half",
                    "requests",
                    "simulated, s",
                    "steps",
                    "output tokens/s",
                    "TTFT p99, s",
                    "ITL p99, s",
                    "batched requests",
                    "deaths",
                ),
                [
                    (
                        f"{number}",
                        f"{r.num_finished:,}",
                        f"{r.seconds:,.0f}",
                        f"{r.num_steps:,}",
                        f"{r.output_tokens_per_second:,.0f}",
                        seconds(r.ttft.p99),
                        seconds(r.itl.p99),
                        f"{r.mean_batched_requests:.1f}",
                        f"{r.num_deaths}",
                    )
                    for number, r in enumerate(reports, start=1)
                ],
            )
        ],
    )


STUDIES = (
    Study(
        name="beyond_schedulers",
        title="Schedulers over executors",
        question="One scheduler plans every step of its executors. How many can it keep busy, and "
        "does a second scheduler double that?",
        run=run_schedulers,
        page=PAGE,
    ),
    Study(
        name="beyond_thousand",
        title="A thousand executors, a hundredth of them",
        question="Can a fleet of a thousand executors be tried out before it is bought?",
        run=run_thousand,
        page=PAGE,
    ),
)
