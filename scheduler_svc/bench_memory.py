"""`octavo bench memory`: how well the KV pool is used under a workload, without a model.

The real core is driven by a trace or by drawn lengths. Steps take a modelled time (a
fixed part and a part per token), so that arrivals and steps interleave as in service;
tokens have no content. What is counted is the core's own: slots that hold a token,
slots of referenced blocks, and blocks that sharing saved.

Beam search needs a model to decide which beams live: measure it with `octavo bench
--beam-width` on a running service.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scheduler_svc.core.request import Request, SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import CoreConfig
from scheduler_svc.core.step import StepPlan, StepResult
from scheduler_svc.errors import QueueFull

# Means of the paper's two data sets: tokens in, tokens out (section 6.1).
_MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come: seconds, and tokens in and out."""

    seconds: float
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """Modelled duration of a step: seconds = fixed + per_token * tokens."""

    fixed: float
    per_token: float

    def of(self, plan: StepPlan) -> float:
        """Seconds that this step takes."""
        return self.fixed + self.per_token * plan.num_tokens


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """The result. Shares are means over steps; a block counts once however shared."""

    num_requests: int
    num_samples: int
    num_steps: int
    mean_running: float
    kv_use: float
    saved_by_sharing: float
    num_recompute_preemptions: int
    num_swap_preemptions: int
    num_copied_blocks: int
    simulated_seconds: float


def read_trace(path: Path, limit: int, max_prompt: int, max_output: int) -> list[Arrival]:
    """Read arrival_s, prompt_tokens, output_tokens of a CSV file, gzipped or not."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    rows = list(csv.DictReader(text.splitlines()))[:limit]
    return [
        Arrival(
            float(row["arrival_s"] or 0.0),
            max(1, min(int(row["prompt_tokens"]), max_prompt)),
            max(1, min(int(row["output_tokens"]), max_output)),
        )
        for row in rows
    ]


def draw(kind: str, count: int, *, rate: float, sigma: float, seed: int) -> list[Arrival]:
    """Draw log-normal lengths with a data set's means, and Poisson arrivals.

    Args:
        sigma: spread of the lengths' logarithms. It is not published; the shares that
            sharing saves depend on it.
    """
    rng = random.Random(seed)
    mean_in, mean_out = _MEANS[kind]

    def length(mean: float) -> int:
        return max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))

    now, arrivals = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(Arrival(now, length(mean_in), min(length(mean_out), 2048)))
    return arrivals


def simulate(
    arrivals: Sequence[Arrival], config: CoreConfig, samples: int, step_time: StepTime
) -> MemoryFigures:
    """Serve all arrivals; results come back when their modelled time is over."""
    core = Scheduler(config)
    waiting = _requests(arrivals, samples)
    upcoming = next(waiting, None)
    now = busy_until = running_seconds = 0.0
    flight: list[tuple[float, StepPlan, int]] = []
    while upcoming is not None or core.has_requests:
        while upcoming is not None and upcoming.arrival <= now:
            try:
                core.add(upcoming)
            except QueueFull:
                break
            upcoming = next(waiting, None)
        while (plan := core.plan(now)) is not None:
            seconds = step_time.of(plan)
            busy_until = max(busy_until, now) + seconds
            running = plan.num_decodes + len(plan.chunk_rows)
            running_seconds += seconds * running
            flight.append((busy_until, plan, len(core.state.in_flight[-1].sampled)))
        if flight:
            now, plan, num_sampled = flight.pop(0)
            core.apply(StepResult(plan.step_id, [1] * num_sampled))
            core.take_outcome()
        elif upcoming is not None:
            now = max(now, upcoming.arrival)
    return _figures(core, len(arrivals), samples, running_seconds / max(now, 1e-9), now)


def _requests(arrivals: Sequence[Arrival], samples: int) -> Iterator[Request]:
    for index, arrival in enumerate(arrivals):
        # No two prompts begin alike, so only the samples of one request share.
        prompt = [index + 2, *([1] * (arrival.num_prompt - 1))]
        yield Request(
            request_id=str(index),
            prompt_tokens=prompt,
            sampling=SamplingParams(),
            max_tokens=arrival.num_output,
            n=samples,
            best_of=samples,
            arrival=arrival.seconds,
        )


def _figures(
    core: Scheduler, num_requests: int, samples: int, mean_running: float, seconds: float
) -> MemoryFigures:
    counters = core.state.counters
    blocks = counters.allocated_slot_steps / core.state.blocks.block_size
    saved = counters.saved_block_steps
    return MemoryFigures(
        num_requests=num_requests,
        num_samples=samples,
        num_steps=counters.num_steps,
        mean_running=round(mean_running, 2),
        kv_use=round(counters.live_slot_steps / max(1, counters.allocated_slot_steps), 4),
        saved_by_sharing=round(saved / max(1.0, saved + blocks), 4),
        num_recompute_preemptions=counters.num_recompute_preemptions,
        num_swap_preemptions=counters.num_swap_preemptions,
        num_copied_blocks=counters.num_copied_blocks,
        simulated_seconds=round(seconds, 1),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo bench memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--trace", type=Path, metavar="FILE", help="CSV with arrival_s,prompt_tokens,output_tokens")
    add("--lengths", choices=tuple(_MEANS), default="sharegpt", help="drawn ones (%(default)s)")
    add("--max-requests", type=int, default=300, help="requests (%(default)s)")
    add("--max-prompt", type=int, default=1024, help="cap on prompts, tokens (%(default)s)")
    add("--max-output", type=int, default=256, help="cap on a trace's outputs (%(default)s)")
    add("--sigma", type=float, default=0.7, help="spread of drawn lengths (%(default)s)")
    add("--rate", type=float, default=1.0, help="drawn requests per second (%(default)s)")
    add("--rate-scale", type=float, default=1.0, help="speed of a trace's arrivals (%(default)s)")
    add("--samples", type=int, default=1, help="n of each request (%(default)s)")
    add("--num-blocks", type=int, default=8192, help="blocks of the pool (%(default)s)")
    add("--block-size", type=int, default=16, help="tokens per block (%(default)s)")
    add("--max-num-seqs", type=int, default=256, help="sequences at once (%(default)s)")
    add("--step-ms", type=float, default=10.0, help="fixed part of a step (%(default)s)")
    add("--token-us", type=float, default=100.0, help="a step's part per token (%(default)s)")
    add("--seed", type=int, default=0, help="of drawn lengths and arrivals (%(default)s)")
    add("--json", metavar="FILE", help="write the figures as JSON; - is standard output")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        if options.trace is not None:
            arrivals = read_trace(
                options.trace, options.max_requests, options.max_prompt, options.max_output
            )
            arrivals = [
                Arrival(a.seconds / options.rate_scale, a.num_prompt, a.num_output)
                for a in arrivals
            ]
        else:
            arrivals = draw(
                options.lengths,
                options.max_requests,
                rate=options.rate,
                sigma=options.sigma,
                seed=options.seed,
            )
        config = CoreConfig(
            num_blocks=options.num_blocks,
            block_size=options.block_size,
            max_num_batched_tokens=max(512, options.max_num_seqs + 256),
            max_num_seqs=options.max_num_seqs,
            max_queue=100_000,
        )
    except (OSError, ValueError, KeyError, ZeroDivisionError) as error:
        sys.stderr.write(f"octavo bench memory: {error}\n")
        return 2
    step_time = StepTime(options.step_ms / 1e3, options.token_us / 1e6)
    figures = asdict(simulate(arrivals, config, options.samples, step_time))
    text = json.dumps(figures)
    if options.json and options.json != "-":
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    else:
        sys.stdout.write(text + "\n")
    return 0
