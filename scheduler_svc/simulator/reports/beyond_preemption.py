"""Preemption by the cheaper way: recompute, swap, and the choice by measured cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_svc.simulator import (
    PAPER_SETUPS,
    Report,
    Roofline,
    SimulationConfig,
    simulate,
    workload,
)
from scheduler_svc.simulator.reports.beyond import PAGE, slim
from scheduler_svc.simulator.reports.findings import Bars, Claim, Findings, Line, Panel, Table
from scheduler_svc.simulator.reports.study import Context, Study

_SETUP = "opt-13b"
_RATE = 2.4
_MODES = ("recompute", "swap", "auto")
_SLACK = 1.05
_PAPER_GB = 25.0


@dataclass(frozen=True, slots=True)
class _Case:
    """Sizes that decide which way is cheaper.

    Attributes:
        block_size: tokens.
        host_gb: of the link to host memory, GB/s.
        is_gathered: a swapped block moves in one copy; else keys and values of every layer
            apart, as in the paper.
    """

    block_size: int
    host_gb: float
    is_gathered: bool

    @property
    def name(self) -> str:
        """For a table."""
        copies = "one copy a block" if self.is_gathered else "a copy per layer"
        return f"{self.block_size} tokens, {self.host_gb:g} GB/s, {copies}"


_BY_BLOCK_SIZE = tuple(_Case(size, _PAPER_GB, False) for size in (4, 8, 16, 32, 64))
_BY_BANDWIDTH = tuple(_Case(16, gb, True) for gb in (0.5, 2.0, 6.0, 25.0, 64.0))


@dataclass(frozen=True, slots=True)
class _Job:
    case: _Case
    mode: str
    num_requests: int
    seed: int


def _run(job: _Job) -> Report:
    setup, case = PAPER_SETUPS[_SETUP], job.case
    device = replace(setup.device, host_bandwidth=case.host_gb * 1e9)
    config = SimulationConfig.of_setup(
        setup,
        cost=Roofline(
            setup.model,
            device,
            setup.num_gpus,
            case.block_size,
            transfers_per_block=1 if case.is_gathered else None,
        ),
        block_size=case.block_size,
        num_host_blocks=setup.num_slots // case.block_size,
        preemption=job.mode,
    )
    requests = workload.sharegpt(job.num_requests, rate=_RATE, seed=job.seed)
    return slim(simulate(config, requests))


def run(context: Context) -> Findings:
    """Serve the same requests with each way, over block sizes and over bandwidths."""
    by_size = context.pick(_BY_BLOCK_SIZE, (_BY_BLOCK_SIZE[2],))
    by_bandwidth = context.pick(_BY_BANDWIDTH, (_BY_BANDWIDTH[0],))
    num_requests = context.pick(600, 120)
    keys = [(case, mode) for case in (*by_size, *by_bandwidth) for mode in _MODES]
    jobs = [_Job(case, mode, num_requests, context.seed) for case, mode in keys]
    found = dict(zip(keys, context.map(_run, jobs), strict=True))
    slowest = max((*by_size, *by_bandwidth), key=lambda case: _over_best(found, case))
    worst = _over_best(found, slowest)
    losses = [_gap(found, case) for case in (*by_size, *by_bandwidth)]
    return Findings(
        setup=f"{_SETUP} on the paper's A100-40GB, {num_requests} requests with ShareGPT's lengths "
        f"at {_RATE:g} a second, which is more than the memory holds at times; as many blocks on "
        "the host as on the device. First over block sizes with the paper's copies (keys and "
        "values of every layer apart), then over the bandwidth of the host link with blocks "
        "that move in one copy.",
        claims=[
            Claim(
                f"auto is never more than {_SLACK - 1:.0%} slower than the better of the two, in "
                "mean normalized latency",
                worst <= _SLACK,
                f"at worst {worst - 1:+.1%}, with {slowest.name}; the wrong way costs up to "
                f"{max(losses) - 1:.0%}",
            ),
            Claim(
                "Nothing is lost: every request ends with all its tokens, whatever the way",
                all(r.num_finished == r.num_requests for r in found.values()),
                f"{num_requests} of {num_requests} in each of {len(found)} runs",
            ),
        ],
        tables=[
            Table(
                "Mean normalized latency, and sequences that were preempted (recomputed + swapped)",
                ("blocks, host link", *_MODES, *(f"preempted, {mode}" for mode in _MODES)),
                [
                    (
                        case.name,
                        *(f"{found[case, m].normalized_latency.mean:.3f} s" for m in _MODES),
                        *(_preempted(found[case, m]) for m in _MODES),
                    )
                    for case in (*by_size, *by_bandwidth)
                ],
            )
        ],
        panels=[
            _panel(found, by_size, "By block size, a copy per layer", "tokens a block", "size"),
            _panel(found, by_bandwidth, "By host link, one copy a block", "GB/s", "gb"),
            Panel(
                "Tokens computed again, by host link",
                "GB/s",
                "share of all that were asked for",
                bars=[Bars(m, [_again(found[case, m]) for case in by_bandwidth]) for m in _MODES],
                x_names=[f"{case.host_gb:g}" for case in by_bandwidth],
            ),
        ],
        notes=[
            "auto compares what a prefilled token adds to a step with the time of a moved block, "
            "for each victim, both as measured; it recomputes until it has measured.",
        ],
    )


def _latency(report: Report) -> float:
    return report.normalized_latency.mean


def _over_best(found: dict[tuple[_Case, str], Report], case: _Case) -> float:
    """What auto has, over the better of the other two."""
    best = min(_latency(found[case, mode]) for mode in ("recompute", "swap"))
    return _latency(found[case, "auto"]) / best


def _gap(found: dict[tuple[_Case, str], Report], case: _Case) -> float:
    """The worse of the two ways over the better one."""
    both = [_latency(found[case, mode]) for mode in ("recompute", "swap")]
    return max(both) / min(both)


def _preempted(report: Report) -> str:
    return f"{report.num_recompute_preemptions} + {report.num_swap_preemptions}"


def _again(report: Report) -> float:
    """Tokens computed again; a sample's last token is never computed."""
    asked = report.num_prompt_tokens + report.num_output_tokens - report.num_finished
    return max(0.0, report.num_computed_tokens / asked - 1)


def _panel(
    found: dict[tuple[_Case, str], Report],
    cases: tuple[_Case, ...],
    title: str,
    x_label: str,
    by: str,
) -> Panel:
    names = [str(case.block_size) if by == "size" else f"{case.host_gb:g}" for case in cases]
    return Panel(
        title,
        x_label,
        "normalized latency, s/token",
        lines=[
            Line(mode, range(len(cases)), [_latency(found[case, mode]) for case in cases])
            for mode in _MODES
        ],
        x_names=names,
    )


STUDY = Study(
    name="beyond_preemption",
    title="Preemption: recompute, swap, or whichever is cheaper",
    question="When memory runs out, a sequence gives its blocks back and is computed again later, "
    "or its blocks move to host memory and back. Which is cheaper depends on the blocks and on "
    "the link; does choosing by measured cost always find the better way?",
    run=run,
    page=PAGE,
)
