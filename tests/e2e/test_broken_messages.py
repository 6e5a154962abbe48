"""Mutated messages by the thousand: no crash, no leak, no INTERNAL that is the client's fault.

With OCTAVO_FULL=1 there are 10,000 of them.
"""

from __future__ import annotations

import asyncio
import collections
import os
import random
from pathlib import Path

import grpc
import pytest
from octavo.v1 import admin_pb2, inference_pb2
from octavo_client._local import LocalStack

from tests.e2e.conftest import Served
from tests.e2e.waiting import until_free
from tests.support.mutation import mutate
from tests.support.stream_grammar import check_refusal

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_MESSAGES = 10_000 if os.environ.get("OCTAVO_FULL") else 200
AT_ONCE = 24
MOST_EVENTS = 3  # of what was accepted after all; then the client leaves
DEADLINE_SECONDS = 6  # the client's own, and no fault of the service
RSS_GROWTH_MIB = 48

_SOUND = {
    "/octavo.v1.InferenceService/Generate": [
        inference_pb2.GenerateRequest(
            request_id="one",
            text="The capital of France is",
            stopping={"max_tokens": 4, "stop": ["Paris"], "stop_token_ids": [2]},
            sampling={"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 7},
        ),
        inference_pb2.GenerateRequest(
            tokens={"ids": range(100, 140)},
            n=3,
            stopping={"max_tokens": 3, "ignore_eos": True},
            output={"logprobs": 2, "prompt_logprobs": 1, "echo": True},
            tenant="acme",
            priority=-3,
        ),
        inference_pb2.GenerateRequest(
            chat={"messages": [{"role": "user", "content": "日本 🙂"}]},
            beam={"width": 3, "length_penalty": 0.8},
            stopping={"max_tokens": 4},
        ),
        inference_pb2.GenerateRequest(
            text="def f(x):",
            sampling={
                "logit_bias": {5: 3.0, 77: -100.0},
                "allowed_token_ids": [5, 6, 7],
                "repetition_penalty": 1.2,
            },
            stopping={"max_tokens": 5},
            resume=[{"index": 0, "token_ids": [5, 6]}],
            cache={"salt": "s"},
        ),
    ],
    "/octavo.v1.InferenceService/Tokenize": [
        inference_pb2.TokenizeRequest(text="some text"),
        inference_pb2.TokenizeRequest(chat={"messages": [{"role": "user", "content": "hi"}]}),
    ],
    "/octavo.v1.InferenceService/Detokenize": [
        inference_pb2.DetokenizeRequest(token_ids=[5, 300, 40_000], keep_special_tokens=True)
    ],
    "/octavo.v1.InferenceService/GetModel": [inference_pb2.GetModelRequest(model="m")],
    "/octavo.v1.AdminService/Snapshot": [
        admin_pb2.SnapshotRequest(include_sequences=True, include_blocks=True)
    ],
    "/octavo.v1.AdminService/Watch": [
        admin_pb2.WatchRequest(interval_ms=20, include_sequences=True)
    ],
}
_STREAMS = ("Generate", "Watch")


def messages(count: int) -> list[tuple[str, bytes]]:
    """Broken messages of every method; most go to Generate, which has most to break."""
    rng = random.Random(20)
    sound = {
        method: [message.SerializeToString() for message in kinds]
        for method, kinds in _SOUND.items()
    }
    methods = [*sound] + ["/octavo.v1.InferenceService/Generate"] * 8
    found = []
    for _ in range(count):
        method = rng.choice(methods)
        found.append((method, mutate(rng.choice(sound[method]), sound[method], rng)))
    return found


async def send(channel: grpc.aio.Channel, method: str, data: bytes) -> str:
    """Send one message and judge the answer; returns the status in a word."""
    try:
        if not method.endswith(_STREAMS):
            await channel.unary_unary(method)(data, timeout=DEADLINE_SECONDS)
            return "OK"
        call = channel.unary_stream(method)(data, timeout=DEADLINE_SECONDS)
        num_events = 0
        async for _ in call:
            num_events += 1
            if num_events >= MOST_EVENTS:
                call.cancel()
                return "OK"
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return error.code().name  # a beam search to the end of the context, say
        check_refusal(error.code(), list(error.trailing_metadata() or ()))
        return error.code().name
    return "OK"


@pytest.mark.timeout(300 + NUM_MESSAGES // 5)
async def test_broken_messages(served: Served) -> None:
    """Each gets its answer; afterwards nothing is held and nothing has grown."""
    client, stack = served
    answers: collections.Counter[str] = collections.Counter()
    queue = iter(messages(NUM_MESSAGES))
    async with grpc.aio.insecure_channel(stack.target) as channel:

        async def send_some(most: int) -> None:
            for _, (method, data) in zip(range(most), queue, strict=False):
                try:
                    answers[await send(channel, method, data)] += 1
                except AssertionError as error:
                    raise AssertionError(f"{method} {data.hex()}: {error}") from error

        # The first third asks for all memory that the largest steps take.
        for share in (NUM_MESSAGES // 3 // AT_ONCE, NUM_MESSAGES):
            before = {name: footprint(stack, name) for name in ("scheduler", "executor")}
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(send_some(share))
    assert sum(answers.values()) == NUM_MESSAGES
    assert answers["INVALID_ARGUMENT"] > NUM_MESSAGES // 4, answers
    assert answers["OK"] > NUM_MESSAGES // 50, answers
    await until_free(client)
    executor = (await client.snapshot()).executors[0]
    assert executor.counters.num_resyncs == 0, "an executor was lost on the way"
    for name, (rss, files) in before.items():
        now_rss, now_files = footprint(stack, name)
        assert now_files <= files + 2, f"{name} keeps files open: {files} to {now_files}"
        assert now_rss - rss < RSS_GROWTH_MIB, f"{name} grew from {rss} to {now_rss} MiB"


def footprint(stack: LocalStack, name: str) -> tuple[float, int]:
    """Resident MiB and open files of a service."""
    process = Path(f"/proc/{stack.pid(name)}")
    status = (process / "status").read_text(encoding="ascii")
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    return int(kib) / 1024, len(list((process / "fd").iterdir()))
