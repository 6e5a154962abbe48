"""The requests that clients make, and when an answer is the same as the undisturbed one."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import httpx
from octavo_client import AsyncClient, Beam, Choice, Completion, TokenLogprob

_SEED = 7
_VOCAB = range(3, 259)  # neither special tokens nor the pairs at the end
_SHARED_TOKENS = (48, 112)
_RECORDED_AT_ONCE = 8
_TIMEOUT_SECONDS = 120.0
_LOGPROB_SLACK = 1e-3
"""What was decoded token by token may be computed again as a chunk, which rounds differently."""
_NONE = TokenLogprob(-1, 1.0)  # like no token's


@dataclass(frozen=True)
class Entry:
    """One request.

    Attributes:
        kind: such as "greedy"; streams are counted by it.
        tokens: of the prompt.
        params: as `AsyncClient.stream` takes them.
        answer: undisturbed; None until it is recorded.
    """

    kind: str
    tokens: tuple[int, ...]
    params: dict[str, Any] = field(default_factory=dict)
    answer: Completion | None = None

    @property
    def comes_at_once(self) -> bool:
        """Whether its tokens come only at its end: nothing flows before."""
        return self.kind in ("beam", "best_of")


@dataclass(frozen=True)
class HttpEntry:
    """One request to the gateway: a body, and the undisturbed text."""

    body: dict[str, Any]
    text: str = ""


def make_entries(copies: int = 3) -> list[Entry]:
    """Make requests of every kind, the same each time.

    Args:
        copies: how many of each kind.
    """
    rng = random.Random(_SEED)
    shared = [_random_tokens(rng, length) for length in _SHARED_TOKENS]
    sampled = {"temperature": 0.8, "top_p": 1.0, "top_k": 0}
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0, "ignore_eos": True},
        "greedy_to_eos": {"temperature": 0.0},
        "sampled": {**sampled, "ignore_eos": True},
        "sampled_to_eos": sampled,
        "n": {**sampled, "n": 3, "ignore_eos": True},
        "best_of": {**sampled, "n": 2, "best_of": 4},
        "beam": {"temperature": 0.0, "n": 3, "beam": Beam(width=3)},
        "stop": {**sampled, "ignore_eos": True},
        "logprobs": {**sampled, "logprobs": 3, "ignore_eos": True},
        "penalized": {**sampled, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        "echo": {"temperature": 0.0, "echo": True},
    }
    entries = []
    for kind, params in kinds.items():
        for _ in range(copies):
            length = rng.randint(5, 88)
            prefix = rng.choice([*shared, ()])
            tokens = (*prefix, *_random_tokens(rng, length))
            own = {"max_tokens": rng.randint(16, 64), "seed": rng.getrandbits(48)}
            entries.append(Entry(kind, tokens, {**params, **own}))
    return entries


def make_http_entries(count: int = 6) -> list[HttpEntry]:
    """Make completions, streamed and not, greedy and sampled."""
    rng = random.Random(_SEED)
    return [
        HttpEntry(
            {
                "model": "",
                "prompt": list(_random_tokens(rng, rng.randint(5, 60))),
                "max_tokens": rng.randint(16, 48),
                "temperature": 0.8 * (number % 2),
                "seed": rng.getrandbits(31),
                "stream": number % 3 != 0,
            }
        )
        for number in range(count)
    ]


async def record(client: AsyncClient, entries: list[Entry]) -> list[Entry]:
    """Ask for every answer while nothing is disturbed, and put it beside its request.

    A stop string is chosen from what comes without one.
    """
    turns = asyncio.Semaphore(_RECORDED_AT_ONCE)

    async def ask(entry: Entry) -> Entry:
        async with turns:
            answer = await client.generate(
                tokens=entry.tokens, timeout=_TIMEOUT_SECONDS, **entry.params
            )
            if entry.kind == "stop" and "stop" not in entry.params:
                params = {**entry.params, "stop": _stop_in(answer.text)}
                answer = await client.generate(
                    tokens=entry.tokens, timeout=_TIMEOUT_SECONDS, **params
                )
                return replace(entry, params=params, answer=answer)
            return replace(entry, answer=answer)

    return list(await asyncio.gather(*map(ask, entries)))


async def record_http(url: str, entries: list[HttpEntry]) -> list[HttpEntry]:
    """Ask the gateway for every text while nothing is disturbed."""
    recorded = []
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_SECONDS, trust_env=False) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        for entry in entries:
            body = {**entry.body, "model": model}
            response = await http.post("/v1/completions", json={**body, "stream": False})
            response.raise_for_status()
            recorded.append(HttpEntry(body, response.json()["choices"][0]["text"]))
    return recorded


def difference(entry: Entry, found: Completion) -> str | None:
    """Say where an answer is not the undisturbed one; None: it is."""
    assert entry.answer is not None
    expected = entry.answer.choices
    if len(found.choices) != len(expected):
        return f"{len(found.choices)} choices instead of {len(expected)}"
    for one, other in zip(expected, found.choices, strict=True):
        if (why := _choice_difference(one, other)) is not None:
            return f"choice {one.index}: {why}"
    return None


def _choice_difference(expected: Choice, found: Choice) -> str | None:
    if found.token_ids != expected.token_ids:
        pairs = enumerate(zip(expected.token_ids, found.token_ids, strict=False))
        first = next((place for place, (one, other) in pairs if one != other), None)
        lengths = f"{len(found.token_ids)} tokens instead of {len(expected.token_ids)}"
        return lengths if first is None else f"token {first} is another one ({lengths})"
    for name in ("text", "finish_reason", "stopped_by", "prompt_token_ids", "prompt_text"):
        one, other = getattr(expected, name), getattr(found, name)
        if one != other:
            return f"{name} is {other!r} instead of {one!r}"
    if len(found.logprobs) != len(expected.logprobs):
        return f"{len(found.logprobs)} logprobs instead of {len(expected.logprobs)}"
    for place, (mine, its) in enumerate(zip(expected.logprobs, found.logprobs, strict=True)):
        gap = abs(mine.chosen.logprob - its.chosen.logprob)
        if mine.chosen.token_id != its.chosen.token_id or gap > _LOGPROB_SLACK:
            return f"logprob {place} is {its.chosen} instead of {mine.chosen}"
        gaps = [
            abs(a.logprob - b.logprob) for a, b in zip_longest(mine.top, its.top, fillvalue=_NONE)
        ]
        if max(gaps, default=0.0) > _LOGPROB_SLACK:
            return f"the likeliest tokens at {place} are {its.top} instead of {mine.top}"
    return None


def _random_tokens(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choices(_VOCAB, k=length))


def _stop_in(text: str) -> str:
    """Two characters from the second half of a text, whole ones."""
    pairs = (text[place : place + 2] for place in range(len(text) // 2, len(text) - 1))
    return next((pair for pair in pairs if "\ufffd" not in pair), text[:1] or "never")
