"""Chunked prefill: what a step's token budget does to the gaps between tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

from scheduler_svc.simulator import (
    DEVICES,
    MODELS,
    Report,
    SimRequest,
    SimulationConfig,
    simulate,
    workload,
)
from scheduler_svc.simulator.reports.beyond import PAGE, own_roofline, seconds, slim
from scheduler_svc.simulator.reports.findings import (
    Claim,
    Findings,
    Line,
    Panel,
    Row,
    Table,
    at_most,
)
from scheduler_svc.simulator.reports.study import Context, Study

_MODEL, _DEVICE = "llama-3.1-8b", "a100-80gb"
_BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
_UNCHUNKED = 1 << 17
_CHATS_PER_SECOND, _DOCUMENTS_PER_SECOND = 4.0, 0.8
_DOCUMENT_TOKENS = (4_000, 8_000)
_DOCUMENT_OUTPUT = 64
_MAX_NUM_SEQS = 128


@dataclass(frozen=True, slots=True)
class _Job:
    """One budget; with the long prompts or without them."""

    budget: int
    has_documents: bool
    num_seconds: float
    seed: int


def _requests(job: _Job) -> list[SimRequest]:
    num_chats = round(_CHATS_PER_SECOND * job.num_seconds)
    found = workload.sharegpt(num_chats, rate=_CHATS_PER_SECOND, seed=job.seed)
    if job.has_documents:
        draw = random.Random(job.seed)
        documents = [
            SimRequest(0.0, draw.randint(*_DOCUMENT_TOKENS), _DOCUMENT_OUTPUT)
            for _ in range(round(_DOCUMENTS_PER_SECOND * job.num_seconds))
        ]
        found += workload.at_rate(documents, _DOCUMENTS_PER_SECOND, job.seed + 1)
    return sorted(found, key=lambda each: each.arrival)


def _run(job: _Job) -> Report:
    config = SimulationConfig.of_machine(
        MODELS[_MODEL],
        DEVICES[_DEVICE],
        cost=own_roofline(_MODEL, _DEVICE),
        max_num_batched_tokens=job.budget,
        max_num_seqs=_MAX_NUM_SEQS,
    )
    return slim(simulate(config, _requests(job)))


def run(context: Context) -> Findings:
    """Serve the same requests under each budget."""
    num_seconds = context.pick(150.0, 15.0)
    budgets = context.pick((*_BUDGETS, _UNCHUNKED), (256, 2048, _UNCHUNKED))
    jobs = [
        _Job(budget, has_documents, num_seconds, context.seed)
        for has_documents in (True, False)
        for budget in budgets
    ]
    reports = context.map(_run, jobs)
    mixed, plain = reports[: len(budgets)], reports[len(budgets) :]
    names = [f"{budget:,}" if budget < _UNCHUNKED else "whole" for budget in budgets]
    return Findings(
        setup=f"{_MODEL} on one {_DEVICE}: chats with ShareGPT's lengths, "
        f"{_CHATS_PER_SECOND:g} a second, and beside them {_DOCUMENTS_PER_SECOND:g} documents a "
        f"second of {_DOCUMENT_TOKENS[0]:,} to {_DOCUMENT_TOKENS[1]:,} tokens, for "
        f"{num_seconds:g} s. The budget is the most tokens that a step computes, decodes first.",
        reference="wanted",
        rows=[
            Row(
                f"ITL p99 at {names[0]} tokens a step, with documents ÷ without",
                mixed[0].itl.p99 / plain[0].itl.p99,
                at_most(1.3),
                "x",
                explanation=_why(mixed[0], plain[0]),
            )
        ],
        claims=_claims(names, mixed),
        tables=[_table(names, mixed, plain)],
        panels=[
            _panel("Gaps between tokens", names, _itl_lines(mixed, plain)),
            _panel("Time to the first token", names, _ttft_lines(mixed)),
        ],
        notes=[
            "A smaller budget moves the cost of a long prompt from everybody's next token to that "
            "prompt's own first one. The budget is bounded below by the decodes, which a step "
            "always computes.",
        ],
    )


def _claims(names: list[str], mixed: list[Report]) -> list[Claim]:
    least, whole = mixed[0].itl.p99, mixed[-1].itl.p99
    return [
        Claim(
            "A small budget takes the stalls out of the streams: ITL p99 is at most a third "
            "of that with whole prompts",
            least <= whole / 3,
            f"{least * 1e3:.0f} ms at {names[0]} tokens a step, {whole * 1e3:.0f} ms with "
            "whole prompts",
        ),
        Claim(
            "Nobody's throughput is lost by it: output tokens/s within 2%",
            min(r.output_tokens_per_second for r in mixed)
            >= 0.98 * max(r.output_tokens_per_second for r in mixed),
            ", ".join(
                f"{r.output_tokens_per_second:,.0f} ({name})"
                for name, r in zip(names, mixed, strict=True)
            ),
        ),
    ]


def _table(names: list[str], mixed: list[Report], plain: list[Report]) -> Table:
    return Table(
        "Gaps between tokens and times to the first one, in seconds",
        (
            "tokens a step",
            "ITL p50",
            "ITL p99",
            "ITL max",
            "TTFT p50",
            "TTFT p99",
            "ITL p99 without documents",
            "tokens/s",
        ),
        [
            (
                name,
                seconds(one.itl.p50),
                seconds(one.itl.p99),
                seconds(one.itl.max),
                seconds(one.ttft.p50),
                seconds(one.ttft.p99),
                seconds(other.itl.p99),
                f"{one.output_tokens_per_second:,.0f}",
            )
            for name, one, other in zip(names, mixed, plain, strict=True)
        ],
    )


def _why(mixed: Report, plain: Report) -> str:
    return (
        "A step that carries a chunk takes the time of the chunk on top of its decodes, whoever "
        "the chunk belongs to; with documents many more steps carry a full one. In the simulator "
        f"ITL p50 goes from {plain.itl.p50 * 1e3:.0f} to {mixed.itl.p50 * 1e3:.0f} ms and p99 "
        f"from {plain.itl.p99 * 1e3:.0f} to {mixed.itl.p99 * 1e3:.0f} ms: p99 is the step with a "
        "full chunk in one case, and the step with one short prompt in the other."
    )


def _itl_lines(mixed: list[Report], plain: list[Report]) -> list[Line]:
    places = range(len(mixed))
    return [
        Line("p50", places, [r.itl.p50 for r in mixed]),
        Line("p99", places, [r.itl.p99 for r in mixed]),
        Line("max", places, [r.itl.max for r in mixed]),
        Line("p99 without documents", places, [r.itl.p99 for r in plain]),
    ]


def _ttft_lines(mixed: list[Report]) -> list[Line]:
    places = range(len(mixed))
    return [
        Line("p50", places, [r.ttft.p50 for r in mixed]),
        Line("p99", places, [r.ttft.p99 for r in mixed]),
    ]


def _panel(title: str, names: list[str], lines: list[Line]) -> Panel:
    return Panel(title, "tokens a step", "seconds", lines=lines, x_names=names, log_y=True)


STUDY = Study(
    name="beyond_chunks",
    title="Chunked prefill and the gaps between tokens",
    question="A long prompt that is computed in one step stalls every stream beside it. How much "
    "shorter are the longest gaps if a step computes only so many tokens of it?",
    run=run,
    page=PAGE,
)
