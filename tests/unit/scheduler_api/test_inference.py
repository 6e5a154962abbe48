"""Tests of scheduler_svc.api.inference over a real server and a scripted engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from octavo.v1 import inference_pb2, types_pb2

from scheduler_svc.core.request import (
    FinishReason,
    PositionLogprobs,
    Request,
    SequenceOutput,
    TokenLogprob,
)
from tests.support.events import ask, ends, kinds, out, scored, script, text_of, tokens_of

if TYPE_CHECKING:
    from .conftest import Service

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
CANCELLED, ERROR = types_pb2.FINISH_REASON_CANCELLED, types_pb2.FINISH_REASON_ERROR
EOS = 0


@pytest.fixture
def spell(service: Service) -> Any:
    tokenizer = service.servicer._codec._tokenizer

    def spelled(text: str) -> list[int]:
        return [tokenizer.token_to_id("Ġ" if letter == " " else letter) for letter in text]

    return spelled


async def test_a_stream_has_its_events_in_order(service: Service, spell: Any) -> None:
    """Started, deltas, Finished, Usage; each says what it is for."""
    script(
        service,
        [out(spell("hi"))],
        [out([*spell(" you"), EOS], finish=FinishReason.STOP, stop_token_id=EOS)],
    )
    events = await service.generate(ask(sampling={"seed": 9}, request_id="r1"))
    assert kinds(events) == ["started", "delta", "delta", "finished", "usage"]
    started, end, usage = events[0].started, ends(events)[0], events[-1].usage
    num_prompt = len(service.engine.requests[0].prompt_tokens)
    assert (started.request_id, started.model, started.seed) == ("r1", "tiny", 9)
    assert (started.num_prompt_tokens, started.max_tokens) == (num_prompt, 200 - num_prompt)
    assert text_of(events) == "hi you"
    assert (end.reason, end.num_tokens) == (STOP, 7)
    assert end.WhichOneof("stopped_by") is None  # an end of sequence is not told
    assert not end.HasField("cumulative_logprob")
    assert (usage.num_prompt_tokens, usage.num_completion_tokens) == (num_prompt, 7)
    assert (usage.cached_prompt_tokens, usage.num_preemptions) == (3, 1)
    assert (usage.queue_seconds, usage.first_token_seconds, usage.total_seconds) == (0.25, 0.5, 2)


async def test_a_stop_token_of_the_client_is_named(service: Service, spell: Any) -> None:
    """Unlike the end of sequence, and its text is left out."""
    tokens = spell("ab")
    script(service, [out(tokens, finish=FinishReason.STOP, stop_token_id=tokens[-1])])
    events = await service.generate(ask(stopping={"stop_token_ids": [tokens[-1]]}))
    assert ends(events)[0].stop_token_id == tokens[-1]
    assert text_of(events) == "a"
    assert tokens_of(events) == tokens


async def test_a_stop_string_ends_the_choice_and_its_sequence(service: Service, spell: Any) -> None:
    """Text ends before it, tokens with the one that completed it, and the engine is told."""
    script(service, [out(spell("a d"))], [out(spell("og ran"))])
    events = await service.generate(ask(stopping={"stop": ["dog"]}))
    end = ends(events)[0]
    assert text_of(events) == "a "
    assert tokens_of(events) == spell("a dog")
    assert (end.reason, end.stop, end.num_tokens) == (STOP, "dog", 5)
    assert service.engine.streams[0].stopped == [0]


async def test_stop_strings_work_for_token_ids_only(service: Service, spell: Any) -> None:
    """A client without text gets the same tokens and the same end."""
    script(service, [out(spell("a dog ran"))])
    events = await service.generate(ask(stopping={"stop": ["dog"]}, output={"omit_text": True}))
    assert text_of(events) == ""
    assert tokens_of(events) == spell("a dog")
    assert ends(events)[0].stop == "dog"


async def test_each_of_n_choices_finishes_once(service: Service, spell: Any) -> None:
    """Choices end at different times and for different reasons."""
    script(
        service,
        [out(spell("a"), 0), out(spell("b"), 1, finish=FinishReason.LENGTH), out(spell("x"), 2)],
        [out(spell("c"), 0)],
        [out(spell("d!"), 0, finish=FinishReason.LENGTH), out(spell("y."), 2)],
    )
    events = await service.generate(ask(n=3, stopping={"stop": ["."]}))
    assert [text_of(events, index) for index in range(3)] == ["acd!", "b", "xy"]
    reasons = {index: end.reason for index, end in ends(events).items()}
    assert reasons == {0: LENGTH, 1: LENGTH, 2: STOP}
    assert events[-1].usage.num_completion_tokens == 4 + 1 + 3


async def test_best_of_returns_the_best_by_mean_logprob(service: Service, spell: Any) -> None:
    """Nothing is shown before all are known; the best come first, renumbered."""
    samples = {0: ("aaaa", -0.625), 1: ("b", -0.5), 2: ("cc", -0.75), 3: ("d", -9.0)}

    def outputs(request: Request) -> list[list[SequenceOutput]]:
        assert request.num_logprobs == 0
        return [
            [
                out(
                    spell(text),
                    index,
                    logprobs=scored(spell(text), each),
                    finish=FinishReason.LENGTH,
                )
            ]
            for index, (text, each) in samples.items()
        ]

    service.engine.script = outputs
    events = await service.generate(ask(n=2, best_of=4))
    assert kinds(events) == ["started", *["delta", "finished"] * 2, "usage"]
    assert [text_of(events, index) for index in range(2)] == ["b", "aaaa"]
    assert [ends(events)[index].cumulative_logprob for index in range(2)] == [-0.5, -2.5]
    assert not events[1].delta.logprobs  # they were not asked for
    assert events[-1].usage.num_completion_tokens == 8


async def test_best_of_ranks_what_stop_strings_left(service: Service, spell: Any) -> None:
    """A sequence stopped by the service is ranked by the tokens that it kept."""
    good, bad = spell("ab.zzz"), spell("cd")
    script(
        service,
        [out(good, 0, logprobs=[*scored(good[:3], -0.1), *scored(good[3:], -50.0)])],
        [out(bad, 1, logprobs=scored(bad, -1.0), finish=FinishReason.LENGTH)],
    )
    events = await service.generate(ask(n=1, best_of=2, stopping={"stop": ["."]}))
    assert text_of(events) == "ab"
    assert ends(events)[0].stop == "."
    assert ends(events)[0].cumulative_logprob == pytest.approx(-0.3)
    assert service.engine.streams[0].stopped == [0]


async def test_beams_come_best_first_with_their_scores(service: Service, spell: Any) -> None:
    """The engine's order and sums are kept."""
    script(
        service,
        [
            out(spell("one"), 0, finish=FinishReason.STOP, cumulative_logprob=-3.0),
            out(spell("two"), 1, finish=FinishReason.LENGTH, cumulative_logprob=-2.0),
        ],
    )
    events = await service.generate(ask(n=2, beam={"width": 3}))
    assert [text_of(events, index) for index in range(2)] == ["one", "two"]
    assert [ends(events)[index].cumulative_logprob for index in range(2)] == [-3.0, -2.0]


async def test_logprobs_come_with_their_tokens(service: Service, spell: Any) -> None:
    """One entry per token, in order, and their sum at the end."""
    tokens = spell("ab")
    logprobs = [
        PositionLogprobs(TokenLogprob(tokens[0], -0.5), (TokenLogprob(tokens[0], -0.5),)),
        PositionLogprobs(TokenLogprob(tokens[1], -1.5), (TokenLogprob(9, -0.25),)),
    ]
    script(service, [out(tokens, logprobs=logprobs, finish=FinishReason.LENGTH)])
    events = await service.generate(ask(output={"logprobs": 1}))
    entries = events[1].delta.logprobs
    assert [entry.chosen.token_id for entry in entries] == tokens
    assert [entry.chosen.logprob for entry in entries] == [-0.5, -1.5]
    assert entries[1].top[0].token_id == 9
    assert ends(events)[0].cumulative_logprob == -2.0


async def test_echo_is_the_first_delta_of_each_choice(service: Service, spell: Any) -> None:
    """Prompt and text join to one text."""
    script(
        service,
        [out(spell("!"), 0, finish=FinishReason.LENGTH)],
        [out(spell("?"), 1, finish=FinishReason.LENGTH)],
    )
    events = await service.generate(ask("hello fox", n=2, output={"echo": True}))
    for index, end in ((0, "!"), (1, "?")):
        assert text_of(events, index, prompt=True) + text_of(events, index) == "hello fox" + end
    assert [event.delta.index for event in events[1:3]] == [0, 1]
    prompt = service.engine.requests[0].prompt_tokens
    assert list(events[1].delta.token_ids) == prompt


async def test_max_tokens_zero_returns_the_prompt(service: Service) -> None:
    """Echo alone needs no executor; the choice ends with LENGTH."""
    events = await service.generate(ask(output={"echo": True}, stopping={"max_tokens": 0}))
    assert kinds(events) == ["started", "delta", "finished", "usage"]
    assert text_of(events, prompt=True) == "hello world"
    assert (ends(events)[0].reason, ends(events)[0].num_tokens) == (LENGTH, 0)
    assert service.engine.requests == []


async def test_max_tokens_zero_returns_prompt_logprobs(service: Service) -> None:
    """One entry per prompt token, the first one empty, from as many steps as it took."""

    def outputs(request: Request) -> list[list[SequenceOutput]]:
        rest = request.prompt_tokens[1:]
        entries = scored(rest, -0.5)
        return [
            [out([], prompt_logprobs=entries[:1])],
            [out([], prompt_logprobs=entries[1:], finish=FinishReason.LENGTH)],
        ]

    service.engine.script = outputs
    events = await service.generate(
        ask(output={"echo": True, "prompt_logprobs": 0}, stopping={"max_tokens": 0})
    )
    assert kinds(events) == ["started", "delta", "finished", "usage"]
    delta = events[1].delta
    assert delta.is_prompt
    assert delta.text == "hello world"
    assert len(delta.logprobs) == len(delta.token_ids)
    assert not delta.logprobs[0].HasField("chosen")
    chosen = [entry.chosen.token_id for entry in delta.logprobs[1:]]
    assert chosen == list(delta.token_ids[1:])


async def test_large_prompts_echo_in_parts(service: Service) -> None:
    """No event grows with the prompt beyond what clients receive by default."""
    service.servicer._model = replace(service.servicer._model, max_model_len=None)
    service.engine.limits = replace(service.engine.limits, max_model_len=4000)  # type: ignore[type-var]  # set by the fixture
    ids = [5] * 3000
    request = inference_pb2.GenerateRequest(
        tokens={"ids": ids}, output={"echo": True}, stopping={"max_tokens": 0}
    )
    events = await service.generate(request)
    deltas = [event.delta for event in events if event.WhichOneof("event") == "delta"]
    assert [len(delta.token_ids) for delta in deltas] == [1024, 1024, 952]
    assert [bool(delta.text) for delta in deltas] == [True, False, False]


async def test_a_resumed_choice_goes_on_after_what_the_client_has(
    service: Service, spell: Any
) -> None:
    """The core gets the tokens, the client only what is new, counts include both."""
    script(service, [out(spell("lo fox"), finish=FinishReason.LENGTH)])
    request = ask(resume=[{"index": 0, "token_ids": spell("hel")}], output={"echo": True})
    events = await service.generate(request)
    assert service.engine.requests[0].resumed == {0: tuple(spell("hel"))}
    assert text_of(events) == "lo fox"
    assert text_of(events, prompt=True) == ""  # the client has that too
    assert ends(events)[0].num_tokens == 9
    assert events[-1].usage.num_completion_tokens == 9


async def test_a_stop_string_spans_the_break(service: Service, spell: Any) -> None:
    """What the first call held back is still held back, and then matched."""
    script(service, [out(spell("og ran"))])
    events = await service.generate(
        ask(resume=[{"index": 0, "token_ids": spell("a d")}], stopping={"stop": ["dog"]})
    )
    assert text_of(events) == ""
    assert tokens_of(events) == spell("og")
    assert ends(events)[0].stop == "dog"


async def test_held_text_is_given_after_the_break(service: Service, spell: Any) -> None:
    """If no stop string comes of it, the held text is the new stream's first."""
    script(service, [out(spell("uck"), finish=FinishReason.LENGTH)])
    events = await service.generate(
        ask(resume=[{"index": 0, "token_ids": spell("a d")}], stopping={"stop": ["dog"]})
    )
    assert text_of(events) == "duck"


@pytest.mark.parametrize(
    ("tokens", "stopping", "expected"),
    [
        ("a dog", {"stop": ["dog"]}, (STOP, 5)),
        ("a dog and more", {"stop": ["dog"]}, (STOP, 5)),
        ("abc", {"max_tokens": 3}, (LENGTH, 3)),
    ],
)
async def test_a_choice_that_had_ended_only_finishes(
    service: Service, spell: Any, tokens: str, stopping: dict[str, Any], expected: tuple[int, int]
) -> None:
    """Its end is told at once and no executor is asked."""
    events = await service.generate(
        ask(resume=[{"index": 0, "token_ids": spell(tokens)}], stopping=stopping)
    )
    assert kinds(events) == ["started", "finished", "usage"]
    assert (ends(events)[0].reason, ends(events)[0].num_tokens) == expected
    assert service.engine.requests == []


async def test_an_ended_choice_does_not_hold_up_the_others(service: Service, spell: Any) -> None:
    """It is stopped at the engine, the other one goes on."""
    script(service, [out(spell("no"), 0), out(spell("yes"), 1, finish=FinishReason.LENGTH)])
    events = await service.generate(
        ask(n=2, resume=[{"index": 0, "token_ids": [*spell("hi"), EOS]}])
    )
    assert service.engine.streams[0].stopped == [0]
    assert text_of(events, 0) == ""
    assert text_of(events, 1) == "yes"
    assert (ends(events)[0].reason, ends(events)[0].num_tokens) == (STOP, 3)


async def test_ranked_choices_are_resumed_by_doing_them_again(service: Service, spell: Any) -> None:
    """The client gets what it lacks of the same choice, or an error if it is another."""
    beams = [out(spell("one two"), 0, finish=FinishReason.STOP, cumulative_logprob=-3.0)]
    script(service, beams)
    fields: dict[str, Any] = {"beam": {"width": 2}}
    events = await service.generate(ask(resume=[{"token_ids": spell("one")}], **fields))
    assert text_of(events) == " two"
    assert ends(events)[0].cumulative_logprob == -3.0
    events, error = await service.failing(ask(resume=[{"token_ids": spell("two")}], **fields))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ends(events)[0].reason == ERROR
