"""Broken HTTP bodies by the hundred: an answer in OpenAI's shape, no 5xx, nothing held.

With OCTAVO_FULL=1 there are 10,000 of them.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import random
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Served
from tests.e2e.waiting import until_free
from tests.support.json_mutation import broken_body

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_BODIES = 10_000 if os.environ.get("OCTAVO_FULL") else 120
AT_ONCE = 16
DEADLINE_SECONDS = 6  # after it the client leaves, which is no fault of the gateway
CLIENTS_FAULT = {400, 401, 404, 413, 422, 429}

_COMMON: dict[str, Any] = {
    "model": "smollm2-135m-instruct", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 2,
    "seed": 3, "stop": ["\n", "END"], "stream": True, "stream_options": {"include_usage": True},
    "presence_penalty": 0.1, "logit_bias": {"50": 3, "70": -100}, "user": "someone",
}  # fmt: skip
_SOUND: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {**_COMMON, "prompt": "The capital of France is", "logprobs": 2, "echo": True},
        {"model": _COMMON["model"], "prompt": [[5, 6, 7], [8, 9]], "max_tokens": 2, "best_of": 2},
        {"prompt": ["日本 🙂", "b"], "max_tokens": 2, "top_k": 4, "min_p": 0.1, "ignore_eos": True},
        {"prompt": "x", "max_tokens": 3, "use_beam_search": True, "n": 2, "length_penalty": 0.5},
    ],
    "/v1/chat/completions": [
        {**_COMMON, "messages": [{"role": "user", "content": "hi"}], "logprobs": True},
        {
            "model": _COMMON["model"],
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            "max_completion_tokens": 3,
            "top_logprobs": 2,
            "logprobs": True,
            "response_format": {"type": "text"},
        },
    ],
    "/tokenize": [{"prompt": "some text"}, {"messages": [{"role": "user", "content": "hi"}]}],
    "/detokenize": [{"tokens": [5, 300, 40_000]}],
}


def bodies(count: int) -> list[tuple[str, bytes]]:
    """Broken bodies for every path, most for the two that generate."""
    rng = random.Random(30)
    paths = [*_SOUND] + ["/v1/completions", "/v1/chat/completions"] * 3
    chosen = [rng.choice(paths) for _ in range(count)]
    return [(path, broken_body(_SOUND[path], rng)) for path in chosen]


async def send(http: httpx.AsyncClient, path: str, body: bytes) -> str:
    """Post a body and judge the answer; returns its status in a word."""
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            headers = {"content-type": "application/json"}
            response = await http.post(path, content=body, headers=headers)
    except TimeoutError:
        return "left"
    if response.status_code == 200:
        if response.headers["content-type"].startswith("text/event-stream"):
            check_events(response.text)
        else:
            assert isinstance(response.json(), dict)
        return "200"
    assert response.status_code in CLIENTS_FAULT, f"{response.status_code} {response.text}"
    error = response.json()["error"]
    assert error["message"]
    assert error["type"]
    assert {"param", "code"} <= error.keys()
    return str(response.status_code)


def check_events(text: str) -> None:
    """Every event is JSON, none is an error, and the last says that it is."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]", events[-1]
    for event in events[:-1]:
        assert "error" not in json.loads(event), event


@pytest.mark.timeout(300 + NUM_BODIES // 5)
async def test_broken_bodies(served: Served) -> None:
    """Each gets its answer; afterwards nothing is held."""
    client, stack = served
    answers: collections.Counter[str] = collections.Counter()
    queue = iter(bodies(NUM_BODIES))
    async with httpx.AsyncClient(base_url=stack.http_url, timeout=60, trust_env=False) as http:

        async def send_some() -> None:
            for path, body in queue:
                try:
                    answers[await send(http, path, body)] += 1
                except (AssertionError, ValueError, httpx.HTTPError) as error:
                    raise AssertionError(f"{path} {body!r}: {error!r}") from error

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(send_some())
        assert (await http.get("/health")).status_code == 200
    assert sum(answers.values()) == NUM_BODIES
    assert answers["400"] > NUM_BODIES // 4, answers
    assert answers["200"] > NUM_BODIES // 50, answers
    await until_free(client)
    assert (await client.snapshot()).executors[0].counters.num_resyncs == 0
