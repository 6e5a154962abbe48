"""How long steps take on this machine: a known load, and the cost model fitted to its steps.

    python -P tests/bench/calibrate.py --json FILE

Both services, real ones. The load is requests whose lengths are known: alone, many at once, and
one after the other, so that steps of 1 to 256 tokens come at short and long contexts. A step's
sample (AdminService) says how many sequences decoded and how many tokens were prefilled. Prompts
are prefilled in the order of their arrival and every sequence decodes in every step until its
length, so the samples and the lengths together say what each step attended to. A phase whose
samples do not fit its lengths exactly is left out, and said so.

A step's time is what the device thread took for it, and the pause before it if that was short:
what hands one step to the next is a part of every step. The fit is by least squares of relative
errors, no coefficient below 0. A pool that is too small, at the end, gives the time of a moved
block: what steps that move blocks take longer than those that do not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from octavo_client import NO_RETRIES, AsyncClient, StepSample
from octavo_client._local import LocalOptions, LocalStack
from octavo_client.bench.measure import Record
from octavo_client.bench.run import run_workload
from octavo_client.bench.targets import GrpcTarget, Sampling
from octavo_client.bench.workload import Request

from scheduler_svc.simulator import LinearCost, StepWork

sys.path.append(str(Path(__file__).parents[2]))

from tests.bench.step_fit import Fit, Samples, Sizes, as_json, fit, seconds_of, works_of

MAX_NUM_SEQS = 128
MAX_NUM_BATCHED_TOKENS = 256
_WATCH_SECONDS = 0.25
_SETTLE_SECONDS = 0.6
_COMMAND = "python -P tests/bench/calibrate.py --json FILE"
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 1_000, 30_000


# -- the services, watched ---------------------------------------------------------


class Stack:
    """Both services, a sender, and everything that steps say of themselves.

    Attributes:
        sizes: of the executor and its pools.
        steps: samples so far, in order.
        peak_blocks: most blocks referenced at once since it was last set to 0.
    """

    def __init__(self, options: argparse.Namespace, num_blocks: int | None = None) -> None:
        self._local = LocalOptions(
            model=options.model,
            listen="127.0.0.1:0",
            dtype=options.dtype,
            num_blocks=num_blocks,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            scheduler_args=("--max-num-seqs", str(MAX_NUM_SEQS)),
        )
        self._exit = AsyncExitStack()
        self.steps: list[StepSample] = []
        self.peak_blocks = 0

    async def __aenter__(self) -> Self:
        try:
            return await self._start()
        except BaseException:
            await self._exit.aclose()
            raise

    async def _start(self) -> Self:
        stack = await self._exit.enter_async_context(LocalStack(self._local))
        self.target = await self._exit.enter_async_context(GrpcTarget(stack.target, Sampling()))
        self.client = await self._exit.enter_async_context(
            AsyncClient(stack.target, retry=NO_RETRIES)
        )
        (executor,) = (await self.client.snapshot()).executors
        pool = executor.pool
        self.sizes = Sizes(
            num_blocks=pool.num_total,
            block_size=pool.block_size,
            num_host_blocks=pool.num_host_total,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        )
        self._watching = asyncio.create_task(self._watch())
        await run_workload(self.target, drawn(random.Random(1), [(64, 8)] * 4))
        await asyncio.sleep(_SETTLE_SECONDS)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watching.cancel()
        await self._exit.__aexit__(kind, error, traceback)

    async def _watch(self) -> None:
        async for snapshot in self.client.watch(interval=_WATCH_SECONDS):
            for executor in snapshot.executors:
                self.steps += executor.steps
                self.peak_blocks = max(self.peak_blocks, executor.pool.num_referenced)

    async def run(self, requests: Sequence[Request]) -> tuple[list[Record], list[StepSample]]:
        """Send everything; gives what came back, and the steps that it took.

        Raises:  RuntimeError: if a request failed, or samples of steps were missed.
        """
        if self._watching.done():
            self._watching.result()
        first = len(self.steps)
        run = await run_workload(self.target, requests)
        await asyncio.sleep(_SETTLE_SECONDS)
        failed = [record.error for record in run.records if not record.is_whole]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
        steps = self.steps[first:]
        ids = [step.step_id for step in steps]
        if not ids or ids != list(range(ids[0], ids[0] + len(ids))):
            raise RuntimeError("samples of steps are missing: the watch fell behind")
        return run.records, steps


def drawn(rng: random.Random, lengths: Iterable[tuple[int, int]]) -> list[Request]:
    """Requests of these (prompt, output) lengths, of tokens that no other prompt has."""
    return [
        Request(
            str(number),
            tuple(rng.choices(range(_FIRST_TOKEN_ID, _LAST_TOKEN_ID), k=num_prompt)),
            num_output,
        )
        for number, (num_prompt, num_output) in enumerate(lengths)
    ]


# -- the load ----------------------------------------------------------------------


def phases(num_tokens: int, seed: int, scale: float) -> list[tuple[str, list[Request]]]:
    """The load: names and requests, each to be sent once the one before has ended.

    Args:
        num_tokens: that the pool holds; at most nine tenths of them are used at once.
        seed: of lengths and tokens, which never repeat: the prefix cache would know them.
        scale: below 1 leaves out the longer half and shortens outputs, to try it out.
    """
    rng = random.Random(seed)
    lone = [(n, 12) for n in (16, 100, 256, 420, 700, 1000)]
    short = [(rng.randint(16, 96), 6 + i % 40) for i in range(64)]
    long = [(rng.randint(200, 800), 12 + 4 * i) for i in range(10)]
    paced = [(rng.randint(60, 320), rng.randint(8, 48)) for _ in range(14)]
    found = []
    for name, lengths in (("short", short), ("long", long), ("paced", paced)):
        kept, held = [], 0
        for num_prompt, num_output in lengths[: max(2, int(len(lengths) * scale))]:
            size = num_prompt + num_output + 16
            if held + size <= 0.9 * num_tokens:
                held += size
                kept.append((num_prompt, max(2, int(num_output * scale))))
        requests = drawn(rng, kept)
        if name == "paced":
            for i, r in enumerate(requests):
                requests[i] = Request(r.id, r.prompt, r.num_output_tokens, 0.9 * scale * i)
        found.append((name, requests))
    found = [(name, requests) for name, requests in found if requests]
    for num_prompt, num_output in lone[: max(1, int(len(lone) * scale))]:
        if num_prompt + num_output + 16 <= 0.9 * num_tokens:
            found.append(("lone", drawn(rng, [(num_prompt, num_output)])))
    return found


async def measure_steps(stack: Stack, *, seed: int, scale: float = 1.0) -> Samples:
    """Run the load once."""
    found = Samples()
    for name, requests in phases(stack.sizes.num_blocks * stack.sizes.block_size, seed, scale):
        records, steps = await stack.run(requests)
        works = works_of(records, steps)
        if works is None:
            found.left_out.append(name)
            continue
        found.works += works
        found.seconds += map(seconds_of, steps)
        found.wire_seconds += [step.wire_ns / 2e9 for step in steps]
        if name == "lone":
            prefill = next(i for i, step in enumerate(steps) if step.num_sampled) + 1
            wire = 2 * statistics.median(step.wire_ns / 2e9 for step in steps)
            busy = sum(map(seconds_of, steps[:prefill]))
            found.client_seconds.append(max(0.0, records[0].ttft - busy - wire))
    return found


async def measure_moves(stack: Stack, cost: LinearCost, *, seed: int) -> Samples:
    """Ask for half as much again as the pool holds; gives seconds per moved block, if any moved.

    What a step should take is told by `cost` from its counts and by mean lengths, and scaled so
    that it is right on the steps that moved nothing.
    """
    num_prompt, num_output = 100, 80
    num_each = -(-(num_prompt + num_output) // stack.sizes.block_size)
    count = max(2, round(1.5 * stack.sizes.num_blocks / num_each))
    requests = drawn(random.Random(seed), [(num_prompt, num_output)] * count)
    _, steps = await stack.run(requests)
    still, moving, num_moved = [0.0, 0.0], [0.0, 0.0], 0
    for step in steps:
        context = step.num_decodes * (num_prompt + num_output / 2)
        chunks = [(0, step.num_chunk_tokens)] if step.num_chunk_tokens else None
        work = StepWork(step.num_decodes, int(context), chunks, step.num_sampled)
        blocks = len(step.swapped_in_blocks) + len(step.swapped_out_blocks)
        num_moved += blocks
        sums = moving if blocks else still
        sums[0] += seconds_of(step)
        sums[1] += cost.seconds(work).forward
    if not num_moved or not still[1]:
        return Samples()
    expected = moving[1] * still[0] / still[1]
    return Samples(moved_seconds=[max(0.0, moving[0] - expected) / num_moved])


def machine_name(dtype: str) -> str:
    """Kind of machine, not which one."""
    return f"SmolLM2-135M {dtype} on {os.cpu_count()} cores of {platform.machine()}"


def show(found: Fit, samples: Samples) -> None:
    """Say on stderr how good a fit is."""
    left_out = f", left out: {', '.join(samples.left_out)}" if samples.left_out else ""
    sys.stderr.write(
        f"fitted {found.num_steps} steps, all together {found.bias - 1:+.1%}, each within "
        f"{found.error_p50:.1%} (half of them) and {found.error_p90:.1%} (nine tenths){left_out}\n"
    )


async def calibrate(options: argparse.Namespace) -> str:
    """Run the load `--rounds` times, and once a pool that is too small; gives the JSON."""
    name = options.name or machine_name(options.dtype)
    found = Samples()
    async with Stack(options) as roomy:
        for number in range(options.rounds):
            found.add([await measure_steps(roomy, seed=number, scale=options.scale)])
    fitted = fit(found, roomy.sizes, name)
    async with Stack(options, num_blocks=192) as tight:
        found.add([await measure_moves(tight, fitted.cost, seed=options.rounds)])
    fitted = fit(found, roomy.sizes, name)
    show(fitted, found)
    return as_json(fitted, found, _COMMAND)


def add_stack_options(parser: argparse.ArgumentParser) -> None:
    """Flags of the services, for all programs that start them here."""
    parser.add_argument("--model", default=None, help="as of octavo serve")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: a smaller load, to try")
    parser.add_argument("--name", default="", help="of the machine, in the calibration")


def main() -> int:
    """Write the calibration."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_stack_options(parser)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it there [stdout]")
    options = parser.parse_args()
    text = asyncio.run(calibrate(options)) + "\n"
    if options.json:
        options.json.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
