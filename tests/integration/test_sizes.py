"""What one caller may send, over a real port: texts, conversations, metadata, open calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from octavo.v1 import inference_pb2
from octavo_client import NO_RETRIES, AsyncClient, DeadlineExceeded, InvalidArgument, Started

from scheduler_svc.api.bounds import MAX_TEXT_BYTES
from tests.integration.secured_rig import PROMPT, WAIT, Secured, rest_of, serving

MAX_MESSAGES, MAX_ROLE, MAX_IDS = 4096, 64, 1024 * 1024


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[Secured]:
    """A service that reads requests larger than any text may be."""
    async with serving(tmp_path, max_request_bytes=32 << 20, max_connection_calls=2) as running:
        yield running


@pytest.fixture
async def client(secured: Secured) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(secured.target, retry=NO_RETRIES, timeout=WAIT) as connected:
        yield connected


def turn(content: str = "", role: str = "user") -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("prompt", "field", "bound"),
    [
        ({"prompt": "x" * (MAX_TEXT_BYTES + 1)}, "text", "at most 4194304 bytes"),
        ({"prompt": "é" * (MAX_TEXT_BYTES // 2 + 1)}, "text", "at most 4194304 bytes"),
        (
            {"messages": [turn("x" * (MAX_TEXT_BYTES + 1))]},
            "chat.messages[0].content",
            "at most 4194304 bytes",
        ),
        ({"messages": [turn()] * (MAX_MESSAGES + 1)}, "chat.messages", "at most 4096 entries"),
        (
            {"messages": [turn(), turn(role="r" * (MAX_ROLE + 1))]},
            "chat.messages[1].role",
            "at most 64 characters",
        ),
    ],
)
async def test_prompts_are_bounded(
    client: AsyncClient, prompt: dict[str, Any], field: str, bound: str
) -> None:
    """For Generate and Tokenize alike; the error names field and bound, not the text."""
    text, messages = prompt.get("prompt"), prompt.get("messages")
    with pytest.raises(InvalidArgument) as generated:
        await client.generate(text, messages=messages, max_tokens=1)
    with pytest.raises(InvalidArgument) as tokenized:
        await client.tokenize(text, messages=messages)
    for caught in (generated, tokenized):
        assert caught.value.field == field
        assert bound in str(caught.value)
        assert len(str(caught.value)) < 200


async def test_the_largest_text_is_taken(client: AsyncClient) -> None:
    """To the byte, though none of these texts fits the model's context."""
    text = "ab " * (MAX_TEXT_BYTES // 3) + "c"
    assert len(text) == MAX_TEXT_BYTES
    assert len(await client.tokenize(text, timeout=WAIT)) > 0
    with pytest.raises(InvalidArgument, match="tokens long"):
        await client.generate(text, max_tokens=1)


async def test_ids_to_turn_into_text_are_bounded(client: AsyncClient) -> None:
    """A million at once."""
    with pytest.raises(InvalidArgument, match="at most 1048576 entries") as caught:
        await client.detokenize([1] * (MAX_IDS + 1))
    assert caught.value.field == "token_ids"


async def test_metadata_is_bounded(secured: Secured) -> None:
    """The transport refuses it, and serves the connection's other calls."""
    request = inference_pb2.GetModelRequest().SerializeToString()
    async with grpc.aio.insecure_channel(secured.target) as channel:
        method = channel.unary_unary("/octavo.v1.InferenceService/GetModel")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(request, metadata=(("x-large", "x" * 17_000),), timeout=WAIT)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await method(request, metadata=(("x-large", "x" * 15_000),), timeout=WAIT)


async def test_calls_of_one_connection_are_bounded(secured: Secured, client: AsyncClient) -> None:
    """The third waits in the client; others, on connections of their own, do not."""
    secured.engine.may_run.clear()
    streams = [client.stream(tokens=PROMPT, max_tokens=2) for _ in range(2)]
    for stream in streams:
        assert isinstance(await anext(stream), Started)
    with pytest.raises(DeadlineExceeded):
        await client.model(timeout=0.5)
    # Another set of options is another connection.
    other = [("grpc.use_local_subchannel_pool", 1)]
    request = inference_pb2.GetModelRequest().SerializeToString()
    async with grpc.aio.insecure_channel(secured.target, options=other) as channel:
        method = channel.unary_unary("/octavo.v1.InferenceService/GetModel")
        assert await method(request, timeout=WAIT)
    secured.engine.may_run.set()
    for stream in streams:
        assert len(await rest_of(stream)) == 2
    assert (await client.model()).model
