"""In fp32 on a CPU, log-probabilities are the same to the bit alone and in company."""

from __future__ import annotations

import asyncio

from octavo_client import AsyncClient, Completion

from tests.e2e.conftest import Serve
from tests.e2e.prompts import prompts
from tests.e2e.waiting import until_free

NUM_PROMPTS = 12
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


async def test_alone_and_in_company(serve: Serve) -> None:
    """One after the other, then all at once with their prompts cut into small chunks."""
    answers: list[list[Completion]] = []
    for budget, is_alone in ((256, True), (24, False)):
        async with serve(dtype="float32", num_blocks=200, max_num_batched_tokens=budget) as pair:
            client, _ = pair
            calls = [ask(client, text, **KINDS[n % 2]) for n, text in enumerate(texts())]
            if is_alone:
                answers.append([await call for call in calls])
            else:
                answers.append(list(await asyncio.gather(*calls)))
                counters = (await client.snapshot()).executors[0].counters
                num_tokens = counters.num_generated_tokens
                assert counters.num_steps < num_tokens, "they did not run side by side"
            await until_free(client)
    for alone, together in zip(*answers, strict=True):
        (one,), (other,) = alone.choices, together.choices
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        assert one.prompt_logprobs == other.prompt_logprobs


def texts() -> list[str]:
    """Prompts of several lengths."""
    return [text * (1 + number % 3) for number, text in enumerate(prompts(NUM_PROMPTS))]
