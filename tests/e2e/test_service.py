"""What a client may rely on, against the running services and the real model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from octavo.v1 import inference_pb2
from octavo_client import (
    AlreadyExists,
    AsyncClient,
    Beam,
    Delta,
    Finished,
    FinishReason,
    InvalidArgument,
    NeverFits,
    NotFound,
    OctavoError,
    Started,
)
from octavo_client._async_client import AsyncStream
from octavo_client._local import LocalStack

from tests.e2e.conftest import Served
from tests.e2e.waiting import until_free

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_64_streams_have_exact_lengths_and_leave_no_block(client: AsyncClient) -> None:
    """64 streams of mixed lengths at once end at exactly the length that was asked for."""
    rng = random.Random(1)
    lengths = [min(40, max(1, int(rng.lognormvariate(2.2, 0.6)))) for _ in range(64)]
    prompts = [[rng.randrange(1000, 40000) for _ in range(rng.randint(1, 60))] for _ in lengths]
    completions = await asyncio.gather(
        *(
            client.generate(
                tokens=prompt, max_tokens=length, temperature=0, ignore_eos=True, timeout=200
            )
            for prompt, length in zip(prompts, lengths, strict=True)
        )
    )
    for completion, prompt, length in zip(completions, prompts, lengths, strict=True):
        assert len(completion.choices[0].token_ids) == length
        assert completion.choices[0].finish_reason is FinishReason.LENGTH
        assert completion.usage.num_prompt_tokens == len(prompt)
        assert completion.usage.num_completion_tokens == length
    await until_free(client)


async def test_a_cancelled_stream_frees_its_blocks_within_two_steps(client: AsyncClient) -> None:
    """A client that leaves gives its blocks back while another stream goes on."""
    async with client.stream("Tell me", max_tokens=120, ignore_eos=True, timeout=100) as other:
        await anext(other)
        async with client.stream("Once upon", max_tokens=400, ignore_eos=True, timeout=100) as one:
            async for event, _ in azip(one, range(4)):
                assert event is not None
            before = (await client.snapshot()).executors[0]
            assert before.num_running == 2
        while True:
            after = (await client.snapshot(sequences=True)).executors[0]
            if after.num_running == 1 and after.pool.num_fenced == 0:
                break
            assert after.step_id - before.step_id <= 3
        held = sum(len(s.block_table) for s in after.sequences)
        assert after.pool.num_referenced == held
        # One step may have been planned before the cancel arrived.
        assert after.step_id - before.step_id <= 3
    await until_free(client)


async def rest_of(stream: AsyncStream) -> tuple[int, list[object]]:
    """Read a stream to its end; return the number of tokens and the events."""
    events = [event async for event in stream]
    return sum(len(e.token_ids) for e in events if isinstance(e, Delta)), events


async def azip(events: object, numbers: range) -> AsyncIterator[tuple[object, int]]:
    """Pair events with numbers until the numbers end."""
    iterator = aiter(events)  # type: ignore[call-overload]
    for number in numbers:
        yield await anext(iterator), number


async def test_200_disconnects_leave_the_pool_as_it_was(client: AsyncClient) -> None:
    """Clients that come and go at once leak nothing."""

    async def come_and_go(index: int) -> None:
        async with client.stream(
            f"Story {index}:", max_tokens=50, ignore_eos=True, timeout=100
        ) as stream:
            for _ in range(index % 3):
                await anext(stream)

    for first in range(0, 200, 50):
        await asyncio.gather(*(come_and_go(index) for index in range(first, first + 50)))
    await until_free(client)


async def test_a_seed_draws_the_same_tokens_alone_and_in_company(client: AsyncClient) -> None:
    """Whatever runs beside it, a seeded request with n=4 gives the same four texts."""
    params = {"n": 4, "seed": 11, "temperature": 0.9, "top_p": 0.95, "max_tokens": 16}
    alone = await client.generate("The old lighthouse", timeout=100, **params)
    both = await asyncio.gather(
        client.generate("The old lighthouse", timeout=100, **params),
        *(client.generate(f"Noise {i}", max_tokens=20, timeout=100) for i in range(6)),
    )
    texts = [choice.token_ids for choice in alone.choices]
    assert [choice.token_ids for choice in both[0].choices] == texts
    assert len(set(texts)) > 1
    await until_free(client)


async def test_stop_strings_end_before_the_match(client: AsyncClient) -> None:
    """The text ends before a stop string that spans tokens, and no part of it leaks."""
    whole = await client.generate("1, 2, 3, 4,", temperature=0, max_tokens=24, timeout=60)
    text = whole.choices[0].text
    stop = text[7:11]
    async with client.stream(
        "1, 2, 3, 4,", temperature=0, max_tokens=24, stop=stop, timeout=60
    ) as stream:
        _, events = await rest_of(stream)
    deltas = [event.text for event in events if isinstance(event, Delta)]
    (end,) = [event for event in events if isinstance(event, Finished)]
    assert "".join(deltas) == text[: text.index(stop)]
    assert end.reason is FinishReason.STOP
    assert end.stopped_by == stop
    await until_free(client)


async def test_a_search_with_too_few_ends_still_ends(client: AsyncClient) -> None:
    """Where one token is allowed there is one hypothesis; the other choices end empty."""
    completion = await client.generate(
        tokens=[500, 501, 502],
        n=2,
        beam=Beam(width=2),
        allowed_token_ids=[7],
        max_tokens=3,
        timeout=30,
    )
    assert [list(c.token_ids) for c in completion.choices] == [[7, 7, 7], []]
    await until_free(client)


BAD_REQUESTS = [
    ({"prompt": ""}, "text"),
    ({"tokens": []}, "tokens"),
    ({"tokens": [10**6]}, "tokens.ids[0]"),
    ({"tokens": [5] * 9000}, "tokens"),
    ({"prompt": "a", "temperature": -1.0}, "sampling.temperature"),
    ({"prompt": "a", "temperature": float("nan")}, "sampling.temperature"),
    ({"prompt": "a", "repetition_penalty": 1e-38}, "sampling.repetition_penalty"),
    ({"prompt": "a", "top_p": 0.0}, "sampling.top_p"),
    ({"prompt": "a", "top_p": float("inf")}, "sampling.top_p"),
    ({"prompt": "a", "max_tokens": 0}, "stopping.max_tokens"),
    ({"prompt": "a", "max_tokens": 10**6}, "stopping.max_tokens"),
    ({"prompt": "a", "n": 65}, "n"),
    ({"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
    ({"prompt": "a", "request_id": "no spaces"}, "request_id"),
    ({"prompt": "a", "stop": [""]}, "stopping.stop[0]"),
    ({"prompt": "a", "priority": 1000}, "priority"),
]


@pytest.mark.parametrize(("request_fields", "field"), BAD_REQUESTS)
async def test_bad_input_names_its_field(
    client: AsyncClient, request_fields: dict[str, object], field: str
) -> None:
    """A field out of bounds is INVALID_ARGUMENT with its path and its bound."""
    params = dict(request_fields)
    prompt = params.pop("prompt", None)
    with pytest.raises(InvalidArgument) as caught:
        await client.generate(prompt, timeout=30, **params)  # type: ignore[arg-type]
    assert caught.value.field.startswith(field), str(caught.value)
    assert caught.value.bound
    await until_free(client)


async def test_a_megabyte_of_text_is_answered(client: AsyncClient) -> None:
    """1 MB of text is refused as too long, while another stream goes on."""
    async with client.stream("Meanwhile", max_tokens=30, ignore_eos=True, timeout=60) as other:
        with pytest.raises(InvalidArgument, match="text"):
            await client.generate("word " * 200_000, timeout=60)
        assert (await rest_of(other))[0] == 30


async def test_a_prompt_larger_than_the_pool_is_refused_at_once(client: AsyncClient) -> None:
    """What fits the context but not the whole pool is refused; the next request runs."""
    with pytest.raises((NeverFits, InvalidArgument)):
        await client.generate(tokens=[7] * 7000, max_tokens=10, timeout=30)
    assert (await client.generate("Hi", max_tokens=2, timeout=30)).choices


async def test_unknown_model_and_duplicate_id(client: AsyncClient) -> None:
    """A model that is not served is NOT_FOUND; a live id is ALREADY_EXISTS, the first lives."""
    with pytest.raises(NotFound):
        await client.generate("a", model="gpt-5", timeout=30)
    async with client.stream(
        "First", request_id="same", max_tokens=30, ignore_eos=True, timeout=60
    ) as first:
        assert isinstance(await anext(first), Started)
        with pytest.raises(AlreadyExists):
            await client.generate("Second", request_id="same", max_tokens=2, timeout=30)
        assert (await rest_of(first))[0] == 30


async def test_bytes_that_are_no_request(served: Served) -> None:
    """Invalid UTF-8 and cut messages are the client's error and name the field."""
    _, stack = served
    async with grpc.aio.insecure_channel(stack.target) as channel:
        call = channel.unary_stream("/octavo.v1.InferenceService/Generate")
        bad_text = bytes([0x1A, 3]) + b"a\xff\xfe"
        admin = channel.unary_unary("/octavo.v1.AdminService/Snapshot")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await admin(b"\xff" * 20, timeout=20)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for payload, name in ((bad_text, "text"), (bad_text[:-1], "")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call(payload, timeout=20):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert name in (caught.value.details() or "")
        unknown = inference_pb2.GenerateRequest(text="a").SerializeToString() + b"\xf8\x3f\x07"
        stopping = inference_pb2.GenerateRequest(stopping={"max_tokens": 1}).SerializeToString()
        events = [event async for event in call(unknown + stopping, timeout=30)]
        assert events, "an unknown field is ignored, as protobuf has it"


async def test_the_scheduler_has_no_torch(served: Served) -> None:
    """The running scheduler has mapped no library of torch; the executor has."""
    _, stack = served
    for name, expected in (("scheduler", False), ("executor", True)):
        maps = Path(f"/proc/{stack.pid(name)}/maps").read_text(encoding="utf-8")
        assert ("libtorch" in maps) is expected, name


async def test_both_services_still_serve(client: AsyncClient, served: Served) -> None:
    """After all of the above both processes live and nothing is held."""
    stack: LocalStack = served[1]
    assert stack.pid("scheduler") and stack.pid("executor")
    await until_free(client)
    completion = await client.generate("Good-bye", max_tokens=3, timeout=30)
    assert completion.usage.num_completion_tokens <= 3
    assert not isinstance(completion, OctavoError)
