"""A request's output between the engine and its reader."""

from __future__ import annotations

import asyncio

import pytest

from scheduler_svc.core.request import (
    BeamParams,
    FinishReason,
    PositionLogprobs,
    Request,
    SamplingParams,
    TokenLogprob,
)
from scheduler_svc.errors import Unavailable
from scheduler_svc.stream import TokenStream


class Calls:
    """What a stream asks of its engine."""

    def __init__(self) -> None:
        self.stopped: list[tuple[str, int]] = []
        self.cancelled: list[str] = []

    def stream(self, **fields: object) -> TokenStream:
        """Make a stream whose calls are noted here."""
        request = Request("r", [1], SamplingParams(), 10, **fields)  # type: ignore[arg-type]
        return TokenStream(
            request, lambda name, index: self.stopped.append((name, index)), self.cancelled.append
        )


@pytest.fixture
def calls() -> Calls:
    """A fresh note of calls."""
    return Calls()


async def test_what_comes_between_two_reads_is_coalesced(calls: Calls) -> None:
    """A slow reader gets all tokens of a choice in one output, in order."""
    stream = calls.stream()
    for token in (5, 6, 7):
        stream.push_token(0, token)
    stream.push_finish(0, FinishReason.LENGTH)
    (output,) = await stream.receive()
    assert output.tokens == [5, 6, 7]
    assert output.finish is FinishReason.LENGTH
    assert await stream.receive() == []


async def test_receive_waits_for_the_first_token(calls: Calls) -> None:
    """A reader that is ahead is woken by the next token."""
    stream = calls.stream()
    reading = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    assert not reading.done()
    stream.push_token(0, 9)
    assert (await reading)[0].tokens == [9]


async def test_a_stopped_choice_gets_nothing_more(calls: Calls) -> None:
    """After stop the choice's tokens and end are dropped, and the engine is told once."""
    stream = calls.stream(n=2, best_of=2)
    stream.push_token(1, 3)
    stream.stop(1)
    stream.stop(1)
    stream.push_token(1, 4)
    stream.push_finish(1, FinishReason.STOP)
    stream.push_finish(0, FinishReason.LENGTH)
    outputs = await stream.receive()
    assert [o.sample_index for o in outputs] == [0]
    assert await stream.receive() == []
    assert calls.stopped == [("r", 1)]


async def test_cancel_is_harmless_at_any_time(calls: Calls) -> None:
    """Cancel ends the stream for its reader, tells the engine once, and never after the end."""
    stream = calls.stream()
    stream.cancel()
    stream.cancel()
    assert await stream.receive() == []
    assert calls.cancelled == ["r"]
    ended = calls.stream()
    ended.push_finish(0, FinishReason.STOP)
    ended.cancel()
    assert calls.cancelled == ["r"]


async def test_a_lost_request_raises_after_what_has_come(calls: Calls) -> None:
    """Tokens that came before the loss are still read; then the error is raised."""
    stream = calls.stream()
    stream.push_token(0, 1)
    stream.fail(Unavailable("gone"))
    assert (await stream.receive())[0].tokens == [1]
    with pytest.raises(Unavailable):
        await stream.receive()


async def test_each_choice_ends_once(calls: Calls) -> None:
    """A second end of a choice is dropped, and finish_all ends only what is open."""
    stream = calls.stream(n=3, best_of=3)
    stream.push_finish(1, FinishReason.STOP)
    stream.push_finish(1, FinishReason.ERROR)
    stream.finish_all(FinishReason.CANCELLED)
    ends = {o.sample_index: o.finish for o in await stream.receive()}
    assert ends == {
        0: FinishReason.CANCELLED,
        1: FinishReason.STOP,
        2: FinishReason.CANCELLED,
    }


async def test_beams_have_as_many_choices_as_are_returned(calls: Calls) -> None:
    """Width 4 and n 2 make two choices, whatever runs inside."""
    stream = calls.stream(n=2, beam=BeamParams(4))
    stream.finish_all(FinishReason.CANCELLED)
    assert [o.sample_index for o in await stream.receive()] == [0, 1]


async def test_logprobs_stay_beside_their_tokens(calls: Calls) -> None:
    """Log-probabilities pushed before their token come in the same output, in order."""
    stream = calls.stream()
    for token in (4, 5):
        stream.push_logprobs(0, PositionLogprobs(TokenLogprob(token, -0.5)), ())
        stream.push_token(0, token)
    (output,) = await stream.receive()
    assert output.logprobs is not None
    assert [entry.chosen.token_id for entry in output.logprobs] == output.tokens == [4, 5]
