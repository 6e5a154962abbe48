"""Which executor a request goes to, where prompts begin alike."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from scheduler_svc.simulator import (
    DEVICES,
    MODELS,
    Report,
    SimRequest,
    SimulationConfig,
    simulate,
    traces,
    workload,
)
from scheduler_svc.simulator.reports.beyond import PAGE, own_roofline, percent, seconds, slim
from scheduler_svc.simulator.reports.findings import Bars, Claim, Findings, Panel, Table
from scheduler_svc.simulator.reports.study import Context, Study

_MODEL = "llama-3.1-8b"
_ROUTERS = ("placement", "least-loaded", "round-robin", "longest-prefix")
_OURS, _LEAST, _BLIND = "placement", "least-loaded", "round-robin"
_FILE = "mooncake_conversation.csv.gz"

_NUM_PREFIXES, _PREFIX_IDS, _TOKENS_PER_ID = 400, 8, 512
_SKEW = 0.8
_TAIL_MEANS, _SIGMA = (200.0, 150.0), 0.8


@dataclass(frozen=True, slots=True)
class _Site:
    """Who serves, and what.

    Attributes:
        trace: None: drawn.
        rate: requests/s that are drawn, or times as fast as the trace.
        max_tokens: a step's budget.
    """

    device: str
    num_executors: int
    block_size: int
    num_requests: int
    rate: float
    max_tokens: int
    trace: Path | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    router: str
    site: _Site
    seed: int


def _drawn(site: _Site, seed: int) -> list[SimRequest]:
    """Prompts that begin with one of many texts, some of which are asked for often."""
    draw = random.Random(seed)
    weights = [1 / (1 + rank) ** _SKEW for rank in range(_NUM_PREFIXES)]
    found = []
    for prefix in draw.choices(range(_NUM_PREFIXES), weights, k=site.num_requests):
        tail, output = (
            max(1, round(mean * draw.lognormvariate(-(_SIGMA**2) / 2, _SIGMA)))
            for mean in _TAIL_MEANS
        )
        first = prefix * _PREFIX_IDS
        found.append(
            SimRequest(
                0.0,
                _PREFIX_IDS * _TOKENS_PER_ID + tail,
                output,
                prefix_ids=tuple(range(first, first + _PREFIX_IDS)),
                prefix_tokens=_TOKENS_PER_ID,
            )
        )
    return workload.at_rate(found, site.rate, seed)


def _run(job: _Job) -> Report:
    site = job.site
    if site.trace is None:
        requests = _drawn(site, job.seed)
    else:
        requests = workload.scale_rate(traces.read(site.trace, site.num_requests), site.rate)
    config = SimulationConfig.of_machine(
        MODELS[_MODEL],
        DEVICES[site.device],
        cost=own_roofline(_MODEL, site.device, block_size=site.block_size),
        block_size=site.block_size,
        max_num_batched_tokens=site.max_tokens,
        num_executors=site.num_executors,
        router=job.router,
        seed=job.seed,
    )
    return slim(simulate(config, requests))


def _hits(report: Report) -> float:
    return report.num_prefix_hit_tokens / max(1, report.num_prefix_query_tokens)


def _study(context: Context, site: _Site, source: str, note: str) -> Findings:
    jobs = [_Job(router, site, context.seed) for router in _ROUTERS]
    found = dict(zip(_ROUTERS, context.map(_run, jobs), strict=True))
    return Findings(
        setup=f"{site.num_executors} executors of {_MODEL} on a {site.device} each; {source}. "
        "placement is the service's own: the executor with the fewest tokens to compute, where "
        "a token that its prefix cache has counts for two.",
        claims=_claims(found),
        tables=[_table(found)],
        panels=_panels(found),
        notes=[note],
    )


def _claims(found: dict[str, Report]) -> list[Claim]:
    ours, blind, least = found[_OURS], found[_BLIND], found[_LEAST]
    return [
        Claim(
            "Requests that go to where their beginning is cached wait less for their first "
            "token than in turn, at the 99th percentile",
            ours.ttft.p99 < blind.ttft.p99,
            f"p50 {seconds(ours.ttft.p50)} against {seconds(blind.ttft.p50)} s, p99 "
            f"{seconds(ours.ttft.p99)} against {seconds(blind.ttft.p99)} s",
        ),
        Claim(
            "They compute less: fewer tokens than in turn, and than by load alone",
            ours.num_computed_tokens < blind.num_computed_tokens
            and ours.num_computed_tokens < least.num_computed_tokens,
            f"{ours.num_computed_tokens / 1e6:.2f} against "
            f"{blind.num_computed_tokens / 1e6:.2f} and "
            f"{least.num_computed_tokens / 1e6:.2f} million",
        ),
    ]


def _table(found: dict[str, Report]) -> Table:
    return Table(
        "Routers",
        (
            "router",
            "prompt tokens cached",
            "computed, millions",
            "TTFT p50, s",
            "TTFT p99, s",
            "ITL p99, s",
            "e2e p50, s",
            "e2e p99, s",
        ),
        [
            (
                router,
                percent(_hits(each)),
                f"{each.num_computed_tokens / 1e6:.2f}",
                seconds(each.ttft.p50),
                seconds(each.ttft.p99),
                seconds(each.itl.p99),
                seconds(each.e2e.p50),
                seconds(each.e2e.p99),
            )
            for router, each in found.items()
        ],
    )


def _panels(found: dict[str, Report]) -> list[Panel]:
    return [
        Panel(
            "Time to the first token",
            "",
            "seconds",
            bars=[
                Bars("p50", [r.ttft.p50 for r in found.values()]),
                Bars("p99", [r.ttft.p99 for r in found.values()]),
            ],
            x_names=_ROUTERS,
            log_y=True,
        ),
        Panel(
            "Prompt tokens that were cached",
            "",
            "share",
            bars=[Bars("cached", [_hits(r) for r in found.values()])],
            x_names=_ROUTERS,
            y_limit=1.0,
        ),
    ]


def run_drawn(context: Context) -> Findings:
    """Drawn prompts."""
    site = _Site("a100-80gb", 8, 32, context.pick(2_000, 100), 24.0, 4096)
    tokens = _NUM_PREFIXES * _PREFIX_IDS * _TOKENS_PER_ID
    return _study(
        context,
        site,
        f"{site.num_requests:,} prompts at {site.rate:g} a second, each one of "
        f"{_NUM_PREFIXES} texts of {_PREFIX_IDS * _TOKENS_PER_ID:,} tokens (the popular ones more "
        f"often: Zipf, {_SKEW:g}) and {_TAIL_MEANS[0]:g} tokens of its own, "
        f"{_TAIL_MEANS[1]:g} tokens out",
        f"All texts together are {tokens / 1e6:.1f} million tokens, more than one executor's cache "
        "holds and less than those of all: in turn every executor would need all of them. "
        "longest-prefix looks at the cache first, whatever the load.",
    )


def run_mooncake(context: Context) -> Findings:
    """Conversations of Mooncake."""
    assert context.traces is not None
    site = _Site("h200", 8, 64, context.pick(3_000, 120), 2.0, 8192, trace=context.traces / _FILE)
    return _study(
        context,
        site,
        f"the first {site.num_requests:,} requests of Mooncake's conversations, "
        f"{site.rate:g} times as fast",
        "An ideal cache, one for all and without an end, would have 36.6% of the whole trace's "
        "blocks. The requests come in batches every three seconds.",
    )


_QUESTION = (
    "Prompts that begin alike need their beginning only once, on the executor that has it cached. "
    "Is it worth to send them there, and not to whoever is next or least busy?"
)

STUDIES = (
    Study(
        name="beyond_routing",
        title="Routing by cached prefix",
        question=_QUESTION,
        run=run_drawn,
        page=PAGE,
    ),
    Study(
        name="beyond_routing_mooncake",
        title="Routing by cached prefix on Mooncake's conversations",
        question=_QUESTION,
        run=run_mooncake,
        page=PAGE,
        needs_traces=True,
    ),
)
