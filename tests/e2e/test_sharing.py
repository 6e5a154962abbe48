"""Blocks shared, copied, cached and taken away change no token.

Every configuration is judged by plain transformers: sampled tokens by the random number
that belongs to their place, beams by transformers' own beam search.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
from octavo_client import AsyncClient, Beam, Completion, Counters

from tests.e2e.conftest import Serve
from tests.e2e.judge import Judge
from tests.e2e.prompts import prompts

pytestmark = pytest.mark.asyncio(loop_scope="module")

FULL = bool(os.environ.get("OCTAVO_FULL"))
NUM_PARALLEL = 8 if FULL else 3
NUM_BEAMED = 16 if FULL else 3
NUM_TOKENS = 32 if FULL else 10
TIMEOUT = 1500 if FULL else 240
SEED, TEMPERATURE = 42, 0.8

BLOCK_SIZE = 8


@dataclass
class Pool:
    """A service with a pool of one kind: "roomy", or so tight that it preempts."""

    kind: str
    client: AsyncClient

    async def counters(self) -> Counters:
        """Totals of its scheduler."""
        return (await self.client.snapshot()).executors[0].counters


def chosen() -> list[str]:
    """Short prompts, so that the tight pools can be tight."""
    return sorted(prompts(32), key=len)[: max(NUM_PARALLEL, NUM_BEAMED)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["roomy", "recompute", "swap"])
async def pool(serve: Serve, judge: Judge, request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    """A roomy pool, or one with room for one group at its longest and little more."""
    longest = max(len(judge.encode(text)) for text in chosen())
    shared = longest // BLOCK_SIZE
    each = -(-(longest + NUM_TOKENS) // BLOCK_SIZE) - shared
    options: dict[str, object] = {"num_blocks": 1000}
    if request.param != "roomy":
        options = {
            "num_blocks": shared + 4 * each + 3,
            "num_host_blocks": 200,
            "scheduler_args": ("--preemption", request.param),
        }
    async with serve(dtype="float32", block_size=BLOCK_SIZE, **options) as (client, _):
        yield Pool(request.param, client)


def check_preemptions(pool: Pool, before: Counters, after: Counters) -> None:
    """A tight pool preempted in its own way, a roomy one not at all."""
    recomputed = after.num_recompute_preemptions - before.num_recompute_preemptions
    swapped = after.num_swap_preemptions - before.num_swap_preemptions
    if pool.kind == "roomy":
        assert recomputed == swapped == 0
    else:
        assert (swapped if pool.kind == "swap" else recomputed) > 0


async def sample_all(client: AsyncClient, judge: Judge, texts: list[str]) -> list[Completion]:
    """Four seeded samples of every prompt, all at once."""
    return await asyncio.gather(
        *(
            client.generate(
                tokens=judge.encode(text),
                n=4,
                seed=SEED,
                temperature=TEMPERATURE,
                top_p=1.0,
                top_k=0,
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                timeout=TIMEOUT,
            )
            for text in texts
        )
    )


async def test_parallel_samples_are_those_of_their_seed(pool: Pool, judge: Judge) -> None:
    """n=4 shares the prompt's blocks, is preempted as one, and draws the tokens of its seed."""
    texts = chosen()[:NUM_PARALLEL]
    before = await pool.counters()
    completions = await sample_all(pool.client, judge, texts)
    after = await pool.counters()
    (again,) = await sample_all(pool.client, judge, texts[:1])
    for text, completion in zip(texts, completions, strict=True):
        for choice in completion.choices:
            output = list(choice.token_ids)
            assert len(output) == NUM_TOKENS
            assert judge.is_drawn(
                judge.encode(text), output, seed=SEED, index=choice.index, temperature=TEMPERATURE
            ), f"{text!r}, sample {choice.index}"
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in completions[0].choices]
    assert after.num_copied_blocks > before.num_copied_blocks
    check_preemptions(pool, before, after)


@pytest.mark.timeout(2 * TIMEOUT)
async def test_beams_equal_transformers_beam_search(pool: Pool, judge: Judge) -> None:
    """Beam search of width 4 gives transformers' best beam, also when it is preempted."""
    texts = chosen()[:NUM_BEAMED]
    before = await pool.counters()
    completions = await asyncio.gather(
        *(
            pool.client.generate(
                tokens=judge.encode(text),
                beam=Beam(width=4),
                max_tokens=NUM_TOKENS,
                ignore_eos=True,
                timeout=TIMEOUT,
            )
            for text in texts
        )
    )
    check_preemptions(pool, before, await pool.counters())
    for text, completion in zip(texts, completions, strict=True):
        expected = judge.generate(judge.encode(text), NUM_TOKENS, num_beams=4)
        assert list(completion.choices[0].token_ids) == expected, text


async def test_an_urgent_request_takes_the_blocks_of_others(pool: Pool, judge: Judge) -> None:
    """A higher priority preempts by force where room is short, and no one's tokens change."""
    prompt = judge.encode(chosen()[-1])
    before = await pool.counters()

    async def ask(priority: int) -> Completion:
        return await pool.client.generate(
            tokens=prompt,
            n=4,
            seed=SEED,
            temperature=TEMPERATURE,
            top_p=1.0,
            top_k=0,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            priority=priority,
            timeout=240,
        )

    patient = asyncio.create_task(ask(priority=-1))
    while (await pool.counters()).num_generated_tokens < before.num_generated_tokens + 8:
        await asyncio.sleep(0.01)
    urgent = await ask(priority=5)
    was_overtaken = not patient.done()
    completions = [urgent, await patient]
    after = await pool.counters()
    check_preemptions(pool, before, after)
    if pool.kind != "roomy":
        assert was_overtaken and completions[1].usage.num_preemptions > 0
        assert completions[0].usage.num_preemptions == 0
    for completion in completions:
        for choice in completion.choices:
            output = list(choice.token_ids)
            assert judge.is_drawn(
                prompt, output, seed=SEED, index=choice.index, temperature=TEMPERATURE
            )


async def test_a_shared_prefix_is_computed_once(pool: Pool, judge: Judge) -> None:
    """A second request with the same beginning hits the cache and gets the same tokens."""
    num_blocks = (await pool.client.snapshot()).executors[0].pool.num_total
    words = judge.encode("The rules of the game are as follows. " * 12)
    prefix = words[: min(len(words), (num_blocks - 6) * BLOCK_SIZE // 2)]
    tails = [judge.encode(text)[:8] for text in chosen()[:3]]

    async def ask(tail: list[int], **params: object) -> Completion:
        return await pool.client.generate(
            tokens=[*prefix, *tail],
            temperature=0,
            max_tokens=8,
            ignore_eos=True,
            timeout=100,
            **params,  # type: ignore[arg-type]
        )

    cold = await ask(tails[0], cache_disable=True)
    first = await ask(tails[0])
    warm = [await ask(tail) for tail in tails]
    other_tenant = await ask(tails[0], tenant="someone-else")
    assert cold.usage.cached_prompt_tokens == first.usage.cached_prompt_tokens == 0
    assert other_tenant.usage.cached_prompt_tokens == 0
    for tail, completion in zip(tails, warm, strict=True):
        cached = completion.usage.cached_prompt_tokens
        assert cached >= len(prefix) // BLOCK_SIZE * BLOCK_SIZE, (
            "every full block of the prefix is hit"
        )
        assert cached < completion.usage.num_prompt_tokens, "the last token is computed"
        output = list(completion.choices[0].token_ids)
        assert judge.first_difference([*prefix, *tail], output) is None
    assert warm[0].choices[0].token_ids == cold.choices[0].token_ids
