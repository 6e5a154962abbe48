"""A pool of a quarter of what is needed: everyone finishes, with the right tokens.

In full (OCTAVO_REQUESTS=FILE.json, a list of {prompt, out}), the table that is printed
compares the three kinds of preemption on one workload.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from octavo_client import AsyncClient, Counters

from tests.e2e.conftest import Serve

BLOCK_SIZE = 16
FULL = "OCTAVO_REQUESTS" in os.environ
# test_sharing.py has the other kinds in short.
KINDS = ("recompute", "swap", "auto") if FULL else ("auto",)


@dataclass
class Work:
    """One request: token ids, and how many to generate."""

    prompt: list[int]
    num_output: int

    @property
    def num_blocks(self) -> int:
        """Blocks at its longest."""
        return -(-(len(self.prompt) + self.num_output) // BLOCK_SIZE)


def workload() -> list[Work]:
    """The requests of a file, or a few small ones."""
    source = os.environ.get("OCTAVO_REQUESTS")
    if source:
        entries = json.loads(Path(source).read_text(encoding="utf-8"))
        return [Work(entry["prompt"], entry["out"]) for entry in entries]
    rng = random.Random(3)
    return [
        Work([rng.randrange(1000, 40000) for _ in range(rng.randint(10, 60))], rng.randint(16, 32))
        for _ in range(8)
    ]


@dataclass
class Outcome:
    """What one run gave."""

    tokens: list[list[int]]
    peak_blocks: int
    seconds: float
    counters: Counters


async def run(client: AsyncClient, work: list[Work]) -> Outcome:
    """Send all at once, greedily; note the peak of the pool."""
    peak = 0

    async def watch() -> None:
        nonlocal peak
        async for snapshot in client.watch(interval=0.02):
            peak = max(peak, snapshot.executors[0].pool.num_referenced)

    watching = asyncio.create_task(watch())
    begin = time.monotonic()
    completions = await asyncio.gather(
        *(
            client.generate(
                tokens=each.prompt,
                max_tokens=each.num_output,
                temperature=0,
                ignore_eos=True,
                timeout=1500,
            )
            for each in work
        )
    )
    seconds = time.monotonic() - begin
    watching.cancel()
    executor = (await client.snapshot()).executors[0]
    assert executor.pool.num_referenced == 0
    tokens = [list(c.choices[0].token_ids) for c in completions]
    return Outcome(tokens, peak, seconds, executor.counters)


@pytest.mark.timeout(3600)
async def test_a_quarter_of_the_pool_is_enough(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 25% of the peak need, each kind of preemption gives the tokens of a roomy pool."""
    work = workload()
    async with serve(dtype="float32", block_size=BLOCK_SIZE, num_blocks=4000) as (client, _):
        roomy = await run(client, work)
    num_blocks = max([roomy.peak_blocks // 4, *(each.num_blocks for each in work)])
    lines = [
        f"{len(work)} requests, {sum(w.num_output for w in work)} output tokens; "
        f"peak {roomy.peak_blocks} blocks, then {num_blocks}",
        f"{'pool':>10} {'tokens/s':>9} {'of roomy':>9} {'recomputed':>11} {'swapped':>8} "
        f"{'steps':>6}",
    ]
    rate = sum(map(len, roomy.tokens)) / roomy.seconds
    lines.append(f"{'roomy':>10} {rate:9.1f} {1:9.2f} {0:11} {0:8} {roomy.counters.num_steps:6}")
    for kind in KINDS:
        tight = {"num_blocks": num_blocks, "num_host_blocks": roomy.peak_blocks}
        flags = ("--preemption", kind)
        async with serve(dtype="float32", block_size=BLOCK_SIZE, scheduler_args=flags, **tight) as (
            client,
            _,
        ):
            outcome = await run(client, work)
        recomputed = outcome.counters.num_recompute_preemptions
        swapped = outcome.counters.num_swap_preemptions
        found = sum(map(len, outcome.tokens)) / outcome.seconds
        lines.append(
            f"{kind:>10} {found:9.1f} {found / rate:9.2f} {recomputed:11} {swapped:8} "
            f"{outcome.counters.num_steps:6}"
        )
        assert outcome.tokens == roomy.tokens, kind
        assert recomputed + swapped > 0
        assert kind == "auto" or (recomputed if kind == "recompute" else swapped) > 0
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
