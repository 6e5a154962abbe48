"""`octavo bench core`: what a steady step costs the scheduler, and how long its plan is.

With --rate the steps come by a clock instead of one after another: bench_paced.py.

The core is driven as the engine drives it, without network: plan a step, translate it to
its message, apply the result of the oldest step in flight. Results come at once and hold
one token for every sequence, so that nothing but the scheduler is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from scheduler_svc.core.request import Request, SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import CoreConfig
from scheduler_svc.core.step import StepResult
from scheduler_svc.translation import plan_to_proto

BLOCK_SIZE = 16
WARM_UP_STEPS = 64
_SWEEP_CONTEXTS = (100, 1_000, 10_000, 100_000)
_METHOD = """\
A core per executor is filled with sequences that decode for ever. Their contexts differ
by up to a block, so in every step one in sixteen needs a new block, as in service. The
prompts are computed before anything is measured; the prefix cache is on; queued requests
wait because all rows are taken.

A step is one call of plan, one of apply and one of take_outcome: plan_apply_us is their
time, with garbage collection as it falls. pause_us is the time of name_blocks, which runs
while the executor computes. plan_bytes is the size of the plan's message. Two steps are in
flight throughout.

With --rate N every executor makes N steps a second by the clock, and what counts is the
CPU time of this process as a share of one core, and how many steps were late. That is the
cores with the encoding of plans and the decoding of results. --wire puts the scheduler's
own engine and gRPC around them, and simulated executors into another process, whose time
is not counted. --readers also wakes one reader per sequence at every token, as the public
API would.

Other load on the machine only adds time: compare the min and p50 of runs, not the p99.
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What the cores have to do: numbers per executor."""

    running: int
    queued: int
    context: int
    executors: int


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution: least, middle, and the 99th percentile."""

    min: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up at least two values."""
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        return cls(round(min(values), 1), round(cuts[49], 1), round(cuts[98], 1))


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result for one load; times in microseconds a step of one executor."""

    running: int
    queued: int
    context: int
    executors: int
    steps: int
    plan_apply_us: Spread
    pause_us: Spread
    translate_us: Spread
    plan_bytes: Spread


def main(argv: list[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: flags; the process's own if None.
    Returns: exit status.
    """
    parser = _parser()
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if options.rate is None and options.wire:
        parser.error("--wire needs --rate")
    if options.readers and not options.wire:
        parser.error("--readers needs --wire")
    if options.rate is not None and (options.sweep or options.queued):
        parser.error("--rate goes with neither --sweep nor --queued")
    report, lines = _paced(options) if options.rate is not None else _unpaced(options)
    if options.json == "-":
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return 0
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _paced(options: argparse.Namespace) -> tuple[dict[str, object], list[str]]:
    from scheduler_svc import bench_paced

    load = Load(options.running, 0, options.context, options.executors)
    if options.wire:
        pace = bench_paced.run_engine(load, options.rate, options.seconds, readers=options.readers)
    else:
        pace = bench_paced.pace_cores(load, options.rate, options.seconds)
    return bench_paced.to_json(pace), pace.table()


def _unpaced(options: argparse.Namespace) -> tuple[dict[str, object], list[str]]:
    contexts = _SWEEP_CONTEXTS if options.sweep else (options.context,)
    found = []
    for context in contexts:
        load = Load(options.running, options.queued, context, options.executors)
        found.append(measure(load, options.steps, options.seconds / len(contexts)))
    points = [asdict(each) for each in found]
    return points[0] if len(points) == 1 else {"points": points}, _table(found)


def measure(load: Load, num_steps: int, max_seconds: float) -> Measurement:
    """Drive the cores for `num_steps` steps each, or until the time is over."""
    cores = [steady_core(load, num_steps) for _ in range(load.executors)]
    for _ in range(WARM_UP_STEPS):
        for core in cores:
            _step(core)
    samples: list[tuple[float, float, float, int]] = []
    deadline = time.perf_counter() + max_seconds
    for _ in range(num_steps):
        samples += [_step(core) for core in cores]
        if time.perf_counter() > deadline and len(samples) > 1:
            break
    plan_apply, pause, translate, sizes = zip(*samples, strict=True)
    return Measurement(
        running=load.running,
        queued=load.queued,
        context=load.context,
        executors=load.executors,
        steps=len(samples),
        plan_apply_us=Spread.of(plan_apply),
        pause_us=Spread.of(pause),
        translate_us=Spread.of(translate),
        plan_bytes=Spread.of(sizes),
    )


def _step(core: Scheduler) -> tuple[float, float, float, int]:
    """Take a step; returns microseconds of core, pause and translation, and bytes."""
    clock = time.perf_counter_ns
    started = clock()
    plan = core.plan(now=1.0)
    planned = clock()
    assert plan is not None, "a steady core always has a step to plan"
    message = plan_to_proto(plan, 1)
    size = message.ByteSize()
    translated = clock()
    core.name_blocks()
    paused = clock()
    result = _result(core)
    resumed = clock()
    core.apply(result)
    core.take_outcome()
    ended = clock()
    plan_apply = planned - started + ended - resumed
    times = plan_apply, paused - translated, translated - planned
    return times[0] / 1e3, times[1] / 1e3, times[2] / 1e3, size


def _result(core: Scheduler) -> StepResult:
    record = core.state.in_flight[0]
    return StepResult(record.step_id, [1] * len(record.sampled))


def steady_core(load: Load, num_steps: int) -> Scheduler:
    """A core whose rows are all taken by sequences in decode, two steps in flight."""
    num_tokens = load.context + BLOCK_SIZE
    max_tokens = num_steps + WARM_UP_STEPS + 2 * BLOCK_SIZE
    blocks_each = (num_tokens + max_tokens) // BLOCK_SIZE + 2
    core = Scheduler(
        CoreConfig(
            num_blocks=load.running * blocks_each + 1,
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=load.running * num_tokens + 1,
            max_num_seqs=load.running,
            max_queue=load.running + load.queued,
            watermark=0.0,
        )
    )
    for request in _requests(load, max_tokens):
        core.add(request)
    while core.plan(now=0.0) is not None:
        pass
    core.apply(_result(core))
    return core


def _requests(load: Load, max_tokens: int) -> Iterator[Request]:
    sampling = SamplingParams()
    for index in range(load.running + load.queued):
        # The second token tells prompts apart, so that no block is shared.
        length = load.context + index % BLOCK_SIZE
        prompt = [1, index + 2, *[3] * max(0, length - 2)]
        yield Request(
            f"r{index}",
            prompt,
            sampling,
            max_tokens=max_tokens,
            stop_token_ids=frozenset({2 + index}),
        )


def _table(found: list[Measurement]) -> list[str]:
    names = ("running", "queued", "context", "executors", "steps")
    header = [*names, "plan+apply us p50", "p99", "min", "pause us p50", "translate us p50"]
    header += ["bytes p50", "p99"]
    lines = ["  ".join(header)]
    for m in found:
        values = [getattr(m, name) for name in names]
        values += [m.plan_apply_us.p50, m.plan_apply_us.p99, m.plan_apply_us.min]
        values += [m.pause_us.p50, m.translate_us.p50, m.plan_bytes.p50, m.plan_bytes.p99]
        cells = zip(values, header, strict=True)
        lines.append("  ".join(f"{value:>{len(title)},}" for value, title in cells))
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octavo bench core",
        description="Measure what a steady step costs the scheduler core.",
        epilog=_METHOD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--running", type=_count, default=256, metavar="N", help="sequences in decode [256]")
    add("--queued", type=_number, default=0, metavar="N", help="requests that wait [0]")
    add("--context", type=_count, default=1_000, metavar="TOKENS", help="prompt length [1000]")
    add("--steps", type=_count, default=2_000, metavar="N", help="steps to measure [2000]")
    add("--executors", type=_count, default=1, metavar="N", help="cores, stepped in turn [1]")
    add("--seconds", type=float, default=10.0, metavar="S", help="measure no longer [10]")
    add("--rate", type=_positive, metavar="STEPS/S", help="pace: steps of each executor [none]")
    add("--wire", action="store_true", help="with --rate: through engine and gRPC")
    add("--readers", action="store_true", help="with --wire: also wake a reader per sequence")
    add("--sweep", action="store_true", help=f"contexts {_SWEEP_CONTEXTS}, instead of one")
    add("--json", metavar="FILE|-", help="write JSON; - is stdout, and then nothing else is")
    return parser


def _count(text: str) -> int:
    return _at_least(1, text)


def _number(text: str) -> int:
    return _at_least(0, text)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {value:g}")
    return value


def _at_least(low: int, text: str) -> int:
    value = int(text)
    if value < low:
        raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
