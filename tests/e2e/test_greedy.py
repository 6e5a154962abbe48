"""Served greedy text is transformers' greedy text, token for token."""

from __future__ import annotations

import asyncio
import os

import pytest
from octavo_client import AsyncClient

from tests.e2e.conftest import Serve
from tests.e2e.judge import Judge
from tests.e2e.prompts import prompts

# In full (OCTAVO_FULL=1), transformers' generate runs for all prompts; in short, for a
# few, and the rest is judged by one forward pass each, which is the same by induction.
FULL = bool(os.environ.get("OCTAVO_FULL"))
NUM_PROMPTS = 32 if FULL else 10
NUM_TOKENS = 64 if FULL else 12
NUM_GENERATED = NUM_PROMPTS if FULL else 2


async def serve_all(client: AsyncClient, judge: Judge, **params: object) -> list[list[int]]:
    """Send every prompt at once; return the output tokens."""
    completions = await asyncio.gather(
        *(
            client.generate(
                tokens=judge.encode(text),
                temperature=0,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                timeout=240,
                **params,  # type: ignore[arg-type]
            )
            for text in prompts(NUM_PROMPTS)
        )
    )
    return [list(c.choices[0].token_ids) for c in completions]


def check(judge: Judge, outputs: list[list[int]]) -> None:
    """Every output is greedy, and equals generate's own where that was run."""
    for text, output in zip(prompts(NUM_PROMPTS), outputs, strict=True):
        assert len(output) == NUM_TOKENS
        difference = judge.first_difference(judge.encode(text), output)
        assert difference is None, f"{text!r}: {difference}"
    for text, output in list(zip(prompts(NUM_PROMPTS), outputs, strict=True))[:NUM_GENERATED]:
        assert output == judge.generate(judge.encode(text), NUM_TOKENS), text


# Blocks of 16 are those of the stack that most other tests share.
@pytest.mark.parametrize("block_size", [8, 16, 32] if FULL else [8])
async def test_greedy_equals_transformers(serve: Serve, judge: Judge, block_size: int) -> None:
    """In fp32, many prompts at once give transformers' own tokens at every block size."""
    async with serve(dtype="float32", block_size=block_size) as (client, _):
        outputs = await serve_all(client, judge)
        pool = (await client.snapshot()).executors[0].pool
    check(judge, outputs)
    assert pool.num_referenced == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"] if FULL else ["swap"])
async def test_greedy_equals_transformers_under_preemption(
    serve: Serve, judge: Judge, preemption: str
) -> None:
    """A pool too small for all of them preempts, either way, and changes no token."""
    longest = max(len(judge.encode(text)) for text in prompts(NUM_PROMPTS)) + NUM_TOKENS
    num_blocks = 2 * -(-longest // 8) + 4  # two of the longest, for all of them
    small = {"block_size": 8, "num_blocks": num_blocks, "num_host_blocks": 64}
    flags = ("--preemption", preemption)
    async with serve(dtype="float32", scheduler_args=flags, **small) as (client, _):
        outputs = await serve_all(client, judge)
        executor = (await client.snapshot()).executors[0]
    check(judge, outputs)
    if preemption == "swap":
        assert executor.counters.num_swap_preemptions > 0
    else:
        assert executor.counters.num_recompute_preemptions > 0
    assert executor.pool.num_referenced == 0
    assert executor.pool.num_host_free == executor.pool.num_host_total


async def test_bfloat16_differs_only_where_rounding_explains_it(serve: Serve, judge: Judge) -> None:
    """Where bf16 first leaves the fp32 path, the two logits were a rounding error apart."""
    async with serve(dtype="bfloat16") as (client, _):
        outputs = await serve_all(client, judge)
    for text, output in zip(prompts(NUM_PROMPTS), outputs, strict=True):
        difference = judge.first_difference(judge.encode(text), output)
        if difference is not None:
            # bf16 keeps 8 bits: 2**-8 relative, through 30 layers of residual sums.
            assert difference.gap <= difference.scale * 2**-8 * 8, f"{text!r}: {difference}"
