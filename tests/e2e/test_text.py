"""Greedy text is transformers' text, in every script, streamed and not."""

from __future__ import annotations

import pytest
from octavo_client import AsyncClient, Delta

from tests.e2e.judge import Judge

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_TOKENS = 24
PROMPTS = {
    "Chinese": "从前有一个小村庄,村里住着一个",
    "Japanese": "日本の首都は東京です。大阪は",
    "Korean": "안녕하세요, 제 이름은",
    "emoji": "🙂🚀🌍 I love emoji: 🎉🎊",
    "families": "Emoji families: 👨‍👩‍👧‍👦 👩🏽‍🚀 🏳️‍🌈",
    "combining": "Cafe\u0301 nai\u0308ve re\u0301sume\u0301, a\u0323\u0302o\u031b\u0301:",
    "Hindi": "नमस्ते, मेरा नाम",
    "Thai": "สวัสดีครับ ผมชื่อ",
    "code": "def quicksort(values: list[int]) -> list[int]:\n\tif len(values) <= 1:\n",
    "markup": '<ul>\n  <li class="a">&amp;</li>\n',
    "Arabic": "مرحبا، كيف حالك اليوم؟",
    "Hebrew": "שלום, מה שלומך היום?",
    "both directions": "The word سلام means peace and the word שלום means",
    "spaces": "a  b   c\t\td\r\n\r\n  e",
}


@pytest.mark.parametrize("name", PROMPTS)
async def test_text_equals_transformers(client: AsyncClient, judge: Judge, name: str) -> None:
    """Whole and in deltas; no delta ends within a character."""
    prompt = PROMPTS[name]
    params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "timeout": 60.0}
    whole = await client.generate(prompt, **params)
    tokens = list(whole.token_ids)
    assert judge.first_difference(judge.encode(prompt), tokens) is None
    expected = judge.tokenizer.decode(tokens, skip_special_tokens=True)
    assert whole.text == expected
    async with client.stream(prompt, **params) as stream:
        deltas = [event async for event in stream if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == expected
    assert [token for delta in deltas for token in delta.token_ids] == tokens
    assert len(deltas) > 1, "it was not streamed"
    # What is no UTF-8 in the end is shown as such; nothing that is becomes so on the way.
    broken = sum(delta.text.count("\ufffd") for delta in deltas)
    assert broken == expected.count("\ufffd")


async def test_what_the_prompt_says_comes_back_as_it_was(client: AsyncClient) -> None:
    """Echoed text, and text that went through the tokenizer and back."""
    for prompt in PROMPTS.values():
        echoed = await client.generate(prompt, echo=True, max_tokens=0, timeout=30)
        assert echoed.choices[0].prompt_text == prompt
        tokens = await client.tokenize(prompt)
        assert await client.detokenize(tokens) == prompt
