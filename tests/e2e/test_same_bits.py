"""On a CPU, log-probabilities are the same to the bit alone and in company."""

from __future__ import annotations

import asyncio

import pytest
import torch
from octavo_client import AsyncClient, Completion
from octavo_kernels.cpu.linear import is_worthwhile

from tests.e2e.conftest import Serve
from tests.e2e.prompts import prompts
from tests.e2e.waiting import until_free

# oneDNN, which multiplies bf16 where a processor has AMX, promises no such thing.
DTYPES = [
    dtype
    for dtype in ("float32", "bfloat16")
    if is_worthwhile(torch.empty(2, 2, dtype=getattr(torch, dtype)))
]
NUM_PROMPTS = 8
KINDS: list[dict[str, object]] = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5}]
PARAMS = {"max_tokens": 10, "ignore_eos": True, "logprobs": 5, "prompt_logprobs": 2}


async def ask(client: AsyncClient, prompt: str, **params: object) -> Completion:
    return await client.generate(
        prompt,
        cache_disable=True,
        timeout=120,
        **PARAMS,  # type: ignore[arg-type]
        **params,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("dtype", DTYPES)
async def test_alone_and_in_company(serve: Serve, dtype: str) -> None:
    """One after the other, then all at once, which cuts their prompts into other chunks."""
    async with serve(dtype=dtype, num_blocks=200, max_num_batched_tokens=24) as (client, _):
        kinds = [(text, KINDS[number % 2]) for number, text in enumerate(texts())]
        alone = [await ask(client, text, **kind) for text, kind in kinds]
        num_steps = (await client.snapshot()).executors[0].counters.num_steps
        calls = (ask(client, text, **kind) for text, kind in kinds)
        together = await asyncio.gather(*calls)
        counters = (await client.snapshot()).executors[0].counters
        assert counters.num_steps - num_steps < num_steps, "they did not run side by side"
        await until_free(client)
    for first, second in zip(alone, together, strict=True):
        (one,), (other,) = first.choices, second.choices
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        assert one.prompt_logprobs == other.prompt_logprobs


def texts() -> list[str]:
    """Prompts of several lengths."""
    return [text * (1 + number % 3) for number, text in enumerate(prompts(NUM_PROMPTS))]
