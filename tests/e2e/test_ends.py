"""However a choice or a call ends, it ends once, for a reason, and holds nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import grpc
import pytest
from octavo.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from octavo_client import AsyncClient, Beam, Delta, Finished, FinishReason, InvalidArgument

from tests.e2e.conftest import Serve, Served
from tests.e2e.waiting import until_free

pytestmark = pytest.mark.asyncio(loop_scope="session")

STORY = "Once upon a time, in a village at the edge of a dark forest,"
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "timeout": 60.0}


@pytest.mark.parametrize(
    "prompt", [{"prompt": ""}, {"tokens": []}, {"messages": []}], ids=["text", "tokens", "chat"]
)
async def test_an_empty_prompt_is_its_callers_fault_alone(
    client: AsyncClient, prompt: dict[str, object]
) -> None:
    """Another stream goes on as if nothing had been."""
    async with client.stream(STORY, **GREEDY) as other:
        await anext(other)
        with pytest.raises(InvalidArgument):
            await client.generate(timeout=30, **prompt)  # type: ignore[arg-type]
        deltas = [event async for event in other if isinstance(event, Delta)]
    assert sum(len(delta.token_ids) for delta in deltas) == GREEDY["max_tokens"]


async def test_a_prompt_is_scored_without_a_token_generated(client: AsyncClient) -> None:
    """max_tokens 0 with echo and prompt log-probabilities."""
    tokens = await client.tokenize(STORY)
    params = {"echo": True, "prompt_logprobs": 2, "max_tokens": 0, "timeout": 30.0}
    completion = await client.generate(STORY, **params)
    (choice,) = completion.choices
    assert choice.prompt_text == STORY
    assert choice.prompt_token_ids == tokens
    assert choice.token_ids == ()
    assert choice.finish_reason is FinishReason.LENGTH
    scored = [position.chosen.token_id for position in choice.prompt_logprobs]
    assert scored[1:] == list(tokens[1:]), "one score per token that has a past"
    assert all(position.chosen.logprob <= 0 for position in choice.prompt_logprobs)
    assert completion.usage.num_completion_tokens == 0
    # A beam search tells the same of its prompt.
    params |= {"max_tokens": 2, "n": 2, "beam": Beam(2), "ignore_eos": True}
    searched = await client.generate(STORY, **params)
    assert [c.prompt_logprobs for c in searched.choices] == [choice.prompt_logprobs] * 2
    await until_free(client)


@pytest.mark.parametrize("omit_text", [False, True])
async def test_a_stop_string_ends_wherever_tokens_meet(
    client: AsyncClient, omit_text: bool
) -> None:
    """Any part of the text may be the stop, at any place of it; token-only streams too."""
    whole = await client.generate(STORY, **GREEDY)
    text = whole.text
    stops = [text[first : first + 2 + first % 6] for first in range(0, len(text) - 8, 11)]

    async def stopped(stop: str) -> None:
        deltas, ends = [], []
        async with client.stream(STORY, stop=stop, omit_text=omit_text, **GREEDY) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    deltas.append(event)
                elif isinstance(event, Finished):
                    ends.append(event)
        (end,) = ends
        assert end.reason is FinishReason.STOP
        assert end.stopped_by == stop
        kept = text[: text.index(stop)]
        assert "".join(delta.text for delta in deltas) == ("" if omit_text else kept)
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == list(whole.token_ids[: len(tokens)])
        assert stop in await client.detokenize(whole.token_ids[: end.num_tokens])
        assert stop not in await client.detokenize(whole.token_ids[: end.num_tokens - 1])

    await asyncio.gather(*(stopped(stop) for stop in stops))
    await until_free(client)


async def test_cancels_at_any_time_leave_nothing(served: Served) -> None:
    """Before the request is known, while it runs, twice, and after its end."""
    client, stack = served
    async with grpc.aio.insecure_channel(stack.target) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def cancelled(number: int) -> None:
            call = stub.Generate(
                inference_pb2.GenerateRequest(
                    request_id=f"cancelled-{number}",
                    text=STORY,
                    stopping={"max_tokens": 8, "ignore_eos": True},
                ),
                timeout=60,
            )
            await asyncio.sleep(number % 20 / 100)
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                if number % 3:
                    async for _ in call:
                        if number % 5:
                            break
            call.cancel()
            call.cancel()

        await asyncio.gather(*(cancelled(number) for number in range(60)))
    await until_free(client)
    # Every id is free again.
    again = [
        client.generate(STORY, request_id=f"cancelled-{number}", max_tokens=1, timeout=60)
        for number in range(60)
    ]
    assert len(await asyncio.gather(*again)) == 60
    await until_free(client)


async def test_a_drain_that_runs_out_of_time_ends_every_choice(serve: Serve) -> None:
    """What cannot finish is given up with a reason, and the call says where to go."""
    async with serve(
        dtype="float32", num_blocks=300, scheduler_args=("--grace-seconds", "0.5")
    ) as (_, stack):
        async with grpc.aio.insecure_channel(stack.target) as channel:
            request = inference_pb2.GenerateRequest(
                text=STORY, n=3, stopping={"max_tokens": 1400, "ignore_eos": True}
            )
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60)
            events = [await call.read() for _ in range(4)]
            os.kill(stack.pid("scheduler"), signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                while True:
                    events.append(await call.read())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        ends = [event.finished for event in events if event.WhichOneof("event") == "finished"]
        assert sorted(end.index for end in ends) == [0, 1, 2]
        assert {end.reason for end in ends} == {types_pb2.FINISH_REASON_ERROR}
