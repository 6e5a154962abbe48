"""Tests of scheduler_svc.api.validation: every bound of the protos, from both sides."""

from __future__ import annotations

import math
from typing import Any

import pytest
from octavo.v1 import inference_pb2

from scheduler_svc.api.validation import ServedLimits, Validated, build, check_options
from scheduler_svc.core.request import BeamParams
from scheduler_svc.errors import InvalidArgument
from scheduler_svc.model_files import SamplingDefaults

LIMITS = ServedLimits(
    max_model_len=100,
    vocab_size=50,
    kv_capacity_tokens=1000,
    eos_token_ids=(0, 7),
    sampling=SamplingDefaults(temperature=0.5, top_k=20, top_p=0.75),
)
PROMPT = list(range(10))


def validate(
    fields: dict[str, Any], prompt: list[int] = PROMPT, limits: ServedLimits = LIMITS
) -> Validated:
    if not {"text", "tokens", "chat"} & fields.keys():
        fields = {"text": "x", **fields}
    message = inference_pb2.GenerateRequest(**fields)
    options = check_options(message, limits)
    return build(message, options, prompt, limits, arrival=1.0, deadline=2.0)


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": fields}


def stopping(**fields: Any) -> dict[str, Any]:
    return {"stopping": fields}


def output(**fields: Any) -> dict[str, Any]:
    return {"output": fields}


def resume(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"resume": choices, **more}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"request_id": "é"}, "request_id"),
    ({"request_id": "a\n"}, "request_id"),
    ({"n": 65}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 65}, "best_of"),
    ({"priority": 101}, "priority"),
    ({"priority": -101}, "priority"),
    ({"tenant": "x" * 129}, "tenant"),
    ({"cache": {"salt": "x" * 129}}, "cache.salt"),
    ({"beam": {"width": 1}}, "beam.width"),
    ({"beam": {"width": 17}}, "beam.width"),
    ({"beam": {}}, "beam.width"),
    ({"beam": {"width": 2}, "n": 3}, "n"),
    ({"beam": {"width": 4}, "n": 2, "best_of": 3}, "best_of"),
    ({"beam": {"width": 2, "length_penalty": math.nan}}, "beam.length_penalty"),
    ({"beam": {"width": 2, "length_penalty": math.inf}}, "beam.length_penalty"),
    (sampling(temperature=-0.1), "sampling.temperature"),
    (sampling(temperature=100.1), "sampling.temperature"),
    (sampling(temperature=math.nan), "sampling.temperature"),
    (sampling(temperature=math.inf), "sampling.temperature"),
    (sampling(top_p=0.0), "sampling.top_p"),
    (sampling(top_p=1.01), "sampling.top_p"),
    (sampling(top_p=math.nan), "sampling.top_p"),
    (sampling(min_p=-0.1), "sampling.min_p"),
    (sampling(min_p=1.1), "sampling.min_p"),
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    (sampling(repetition_penalty=101.0), "sampling.repetition_penalty"),
    (sampling(presence_penalty=2.1), "sampling.presence_penalty"),
    (sampling(presence_penalty=-2.1), "sampling.presence_penalty"),
    (sampling(frequency_penalty=2.1), "sampling.frequency_penalty"),
    (sampling(frequency_penalty=math.nan), "sampling.frequency_penalty"),
    (sampling(logit_bias={1: 100.5}), "sampling.logit_bias[1]"),
    (sampling(logit_bias={1: math.nan}), "sampling.logit_bias[1]"),
    (sampling(logit_bias={50: 1.0}), "sampling.logit_bias"),
    (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias"),
    (sampling(allowed_token_ids=[1, 50]), "sampling.allowed_token_ids[1]"),
    (sampling(allowed_token_ids=[1] * 4097), "sampling.allowed_token_ids"),
    (sampling(allowed_token_ids=[0, 7]) | stopping(min_tokens=1), "sampling.allowed_token_ids"),
    (stopping(max_tokens=0), "stopping.max_tokens"),
    (stopping(max_tokens=91), "stopping.max_tokens"),
    (stopping(max_tokens=2**32 - 1), "stopping.max_tokens"),
    (stopping(max_tokens=5, min_tokens=6), "stopping.min_tokens"),
    (stopping(min_tokens=91), "stopping.min_tokens"),
    (stopping(stop=[""]), "stopping.stop[0]"),
    (stopping(stop=["a", "é" * 513]), "stopping.stop[1]"),
    (stopping(stop=["a"] * 17), "stopping.stop"),
    (stopping(stop_token_ids=[50]), "stopping.stop_token_ids[0]"),
    (stopping(stop_token_ids=[1] * 65), "stopping.stop_token_ids"),
    (output(logprobs=21), "output.logprobs"),
    (output(prompt_logprobs=21), "output.prompt_logprobs"),
    (resume({"index": 1}), "resume[0].index"),
    (resume({"index": 0}, {"index": 0}, n=2), "resume[1].index"),
    (resume({"index": 0}, {"index": 0}), "resume"),
    (resume({"index": 0, "token_ids": [1, 50]}), "resume[0].token_ids[1]"),
    (
        resume({"index": 0, "token_ids": [1, 2]}, stopping={"max_tokens": 1}),
        "resume[0].token_ids",
    ),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED)
def test_a_value_out_of_bounds_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    """Each bound refuses the value just past it, and names the field."""
    with pytest.raises(InvalidArgument) as caught:
        validate(fields)
    assert caught.value.field == field


ACCEPTED: list[dict[str, Any]] = [
    {"request_id": "A-z.0_9:" * 16},
    {"n": 64},
    {"n": 2, "best_of": 64},
    {"priority": 100},
    {"priority": -100},
    {"tenant": "é" * 128, "cache": {"salt": "é" * 128}},
    {"beam": {"width": 16, "length_penalty": -1.0}, "n": 16, "best_of": 16},
    sampling(temperature=0.0, top_k=2**32 - 1, top_p=1.0, min_p=1.0),
    sampling(temperature=100.0, repetition_penalty=100.0, presence_penalty=-2.0),
    sampling(frequency_penalty=2.0, seed=2**64 - 1),
    sampling(logit_bias={1: -100.0, 49: 100.0}, allowed_token_ids=[49] * 4096),
    sampling(allowed_token_ids=[0, 1]) | stopping(min_tokens=1),
    stopping(max_tokens=90, min_tokens=90),
    stopping(stop=["é" * 512] * 16, stop_token_ids=[49] * 64),
    output(logprobs=20, prompt_logprobs=20),
    resume({"index": 1, "token_ids": [1, 2]}, {"index": 0}, n=2, stopping={"max_tokens": 2}),
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_a_value_at_the_bound_is_accepted(fields: dict[str, Any]) -> None:
    """Each bound takes the last value within it."""
    validate(fields)


def test_a_prompt_is_required() -> None:
    """Exactly one form of it; none is an error that names the choice."""
    with pytest.raises(InvalidArgument, match="text, tokens, chat"):
        check_options(inference_pb2.GenerateRequest(), LIMITS)


@pytest.mark.parametrize("prompt", ["text", "tokens", "chat"])
def test_an_empty_prompt_is_refused(prompt: str) -> None:
    """Whatever its form, a prompt of no tokens names its field."""
    fields = {"text": "x", "tokens": {"ids": []}, "chat": {}}
    with pytest.raises(InvalidArgument, match="not empty") as caught:
        validate({prompt: fields[prompt]}, prompt=[])
    assert caught.value.field == prompt


def test_a_long_prompt_is_refused_with_both_lengths() -> None:
    """The message has the context's length and the prompt's."""
    with pytest.raises(InvalidArgument, match=r"at most 99 .* 100 tokens.* got 100 tokens"):
        validate({}, prompt=[1] * 100)
    assert validate({}, prompt=[1] * 99).request.max_tokens == 1


def test_a_prompt_may_fill_the_context_if_nothing_is_generated() -> None:
    """Echo and prompt log-probabilities need no room after the prompt."""
    fields = stopping(max_tokens=0) | output(echo=True)
    assert validate(fields, prompt=[1] * 100).request.max_tokens == 0
    with pytest.raises(InvalidArgument):
        validate(fields, prompt=[1] * 101)


def test_no_tokens_are_allowed_with_echo_or_prompt_logprobs() -> None:
    """max_tokens 0 needs the model only for log-probabilities."""
    echo = validate(stopping(max_tokens=0) | output(echo=True))
    scored = validate(stopping(max_tokens=0) | output(prompt_logprobs=0))
    assert (echo.needs_model, scored.needs_model) == (False, True)


def test_max_tokens_defaults_to_the_room_there_is() -> None:
    """The rest of the context, or of the pool if that is smaller; never nothing."""
    assert validate({}).request.max_tokens == 90
    small = ServedLimits(max_model_len=100, vocab_size=50, kv_capacity_tokens=40)
    assert validate({}, limits=small).request.max_tokens == 30
    tiny = ServedLimits(max_model_len=100, vocab_size=50, kv_capacity_tokens=5)
    assert validate({}, limits=tiny).request.max_tokens == 1


def test_several_choices_share_the_pool_by_default() -> None:
    """Without max_tokens, n choices are not planned to need more than the whole pool."""
    limits = ServedLimits(max_model_len=1000, vocab_size=50, kv_capacity_tokens=1000)
    max_tokens = validate({"n": 4}, limits=limits).request.max_tokens
    assert 100 < max_tokens <= (1000 - 10) // 4


def test_the_models_defaults_stand_where_the_client_says_nothing() -> None:
    """Unset is not zero: temperature 0 is greedy, no temperature is the model's."""
    unset = validate({}).request.sampling
    assert (unset.temperature, unset.top_k, unset.top_p) == (0.5, 20, 0.75)
    given = validate(sampling(temperature=0.0, top_k=0, top_p=1.0)).request.sampling
    assert (given.temperature, given.top_k, given.top_p) == (0.0, 0, 1.0)


def test_a_seed_is_drawn_once_per_request() -> None:
    """Two requests without seeds differ; a given seed is used as it is."""
    assert validate({}).request.sampling.seed != validate({}).request.sampling.seed
    assert validate(sampling(seed=0)).request.sampling.seed == 0


def test_a_request_id_is_drawn_if_there_is_none() -> None:
    """It differs, and has the form that clients' ids have."""
    first, second = validate({}).request.request_id, validate({}).request.request_id
    assert first != second
    validate({"request_id": first})


def test_eos_tokens_stop_unless_ignored() -> None:
    """The client's stop tokens are added to the model's, or stand alone."""
    both = validate(stopping(stop_token_ids=[3])).request
    alone = validate(stopping(stop_token_ids=[3], ignore_eos=True)).request
    assert both.stop_token_ids == {0, 3, 7}
    assert alone.stop_token_ids == {3}


def test_best_of_asks_for_the_logprobs_that_ranking_needs() -> None:
    """They are computed but, unasked, not reported."""
    ranked = validate({"n": 2, "best_of": 4})
    assert (ranked.request.best_of, ranked.request.num_logprobs) == (4, 0)
    assert ranked.response.num_logprobs is None
    assert ranked.response.is_ranked
    assert validate({"n": 2}).request.num_logprobs is None


def test_beam_parameters_are_taken_over() -> None:
    """The length penalty is 1 unless set."""
    beam = validate({"beam": {"width": 4, "early_stopping": True}, "n": 2})
    assert beam.request.beam == BeamParams(4, 1.0, early_stopping=True)
    assert (beam.request.n, beam.request.best_of) == (2, 2)


def test_prompt_logprobs_bypass_the_prefix_cache() -> None:
    """Positions that were not computed would have none."""
    assert validate({}).request.use_cache
    assert not validate(output(prompt_logprobs=1)).request.use_cache
    assert not validate({"cache": {"disable": True}}).request.use_cache


def test_resumed_tokens_reach_the_core_unless_choices_are_ranked() -> None:
    """Ranked choices are generated anew, since which is which is known at the end."""
    choice = {"index": 0, "token_ids": [1, 2]}
    assert validate(resume(choice)).request.resumed == {0: (1, 2)}
    ranked = validate(resume(choice, best_of=2))
    assert ranked.request.resumed == {}
    assert ranked.response.resumed == {0: (1, 2)}


def test_large_top_k_keeps_all() -> None:
    """More tokens than there are is no limit at all."""
    assert validate(sampling(top_k=50)).request.sampling.top_k == 0
    assert validate(sampling(top_k=49)).request.sampling.top_k == 49


def test_repeated_allowed_tokens_count_once() -> None:
    """The list is a set, in the client's order."""
    allowed = validate(sampling(allowed_token_ids=[3, 1, 3])).request.sampling.allowed_token_ids
    assert allowed == (3, 1)
