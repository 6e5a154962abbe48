"""Tests of octavo_gateway.schema and .translate: what callers send, and what is made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from octavo_client import Beam, GenerateParams, Message
from octavo_gateway import schema, translate
from octavo_gateway.errors import ApiError
from octavo_gateway.translate import Job


def completion(**body: Any) -> Job:
    raw = json.dumps({"prompt": "p", **body}).encode()
    return translate.from_completion(schema.parse(schema.CompletionBody, raw))


def chat(**body: Any) -> Job:
    turns = [{"role": "user", "content": "hi"}]
    raw = json.dumps({"messages": turns, **body}).encode()
    return translate.from_chat(schema.parse(schema.ChatBody, raw))


def test_every_parameter_reaches_the_scheduler_under_its_name() -> None:
    """What OpenAI and other servers call it becomes what the SDK calls it, values unchanged."""
    job = completion(
        model="m",
        n=2,
        best_of=3,
        max_tokens=7,
        min_tokens=1,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={"50": -100, "51": 2.5},
        allowed_token_ids=[1, 2],
        seed=11,
        stop="end",
        stop_token_ids=[5],
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        priority=-3,
        cache_salt="s",
    )
    assert job.params == {
        "model": "m",
        "n": 2,
        "best_of": 3,
        "max_tokens": 7,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {50: -100.0, 51: 2.5},
        "allowed_token_ids": [1, 2],
        "seed": 11,
        "stop": ["end"],
        "stop_token_ids": [5],
        "include_stop": True,
        "ignore_eos": True,
        "keep_special_tokens": True,
        "priority": -3,
        "cache_salt": "s",
    }
    assert set(job.params) <= set(GenerateParams.__annotations__)


def test_what_is_left_out_or_null_stays_out() -> None:
    """The model's own defaults hold, but for the length of a completion, which is OpenAI's."""
    nothing = dict.fromkeys(("temperature", "stop", "seed", "n", "logit_bias", "stream"))
    assert completion(**nothing).params == completion().params == {"max_tokens": 16}
    assert chat(**nothing).params == chat().params == {}


@pytest.mark.parametrize(
    ("prompt", "sources"),
    [
        ("one", [{"prompt": "one"}]),
        (["one", "two"], [{"prompt": "one"}, {"prompt": "two"}]),
        ([1, 2], [{"tokens": [1, 2]}]),
        ([[1], [2, 3]], [{"tokens": [1]}, {"tokens": [2, 3]}]),
    ],
)
def test_prompts_come_in_four_forms(prompt: Any, sources: list[Any]) -> None:
    """Each prompt is a call of its own."""
    assert [call.source for call in completion(prompt=prompt).calls] == sources


def test_messages_become_turns() -> None:
    """Parts of text are joined by line breaks; a developer is the system to a template."""
    job = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
            {"role": "assistant", "content": "c", "tool_calls": None, "name": "x"},
        ]
    )
    assert job.calls[0].source == {
        "messages": [
            Message("system", "be brief"),
            Message("user", "a\nb"),
            Message("assistant", "c"),
        ]
    }


def test_the_newer_name_of_a_chats_length_wins() -> None:
    """max_completion_tokens, or else max_tokens; refusals use the name that was given."""
    assert chat(max_tokens=3).params["max_tokens"] == 3
    job = chat(max_tokens=3, max_completion_tokens=4)
    assert job.params["max_tokens"] == 4
    assert job.calls[0].names.of("stopping.max_tokens") == "max_completion_tokens"


def test_logprobs_of_both_endpoints() -> None:
    """A completion's is a number, a chat's a switch; with echo the prompt has them too."""
    assert completion(logprobs=0).params["logprobs"] == 0
    scored = completion(logprobs=2, echo=True, max_tokens=0)
    assert scored.params == {"logprobs": 2, "prompt_logprobs": 2, "echo": True, "max_tokens": 0}
    assert scored.calls[0].names.of("output.prompt_logprobs") == "logprobs"
    assert chat(logprobs=True).params["logprobs"] == 0
    assert chat(logprobs=True, top_logprobs=4).logprobs == 4
    assert chat(logprobs=False).logprobs is None


@pytest.mark.parametrize(
    ("fields", "width", "name"),
    [({"n": 3}, 3, "n"), ({"n": 2, "best_of": 5}, 5, "best_of"), ({}, 1, "best_of")],
)
def test_a_beam_is_as_wide_as_best_of_or_n(fields: dict[str, int], width: int, name: str) -> None:
    """The width is refused under the name that it came by."""
    job = completion(use_beam_search=True, length_penalty=0.8, early_stopping=True, **fields)
    assert job.params["beam"] == Beam(width=width, length_penalty=0.8, early_stopping=True)
    assert "best_of" not in job.params
    assert job.calls[0].names.of("beam.width") == name


@pytest.mark.parametrize(("seed", "sent"), [(0, 0), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1)])
def test_seeds_of_either_sign_are_told_apart(seed: int, sent: int) -> None:
    """A negative seed is the unsigned number of the same bits."""
    assert completion(seed=seed).params["seed"] == sent


def test_token_ids_come_with_the_prompts_echo() -> None:
    """return_token_ids asks for the echo; its text is not shown for that."""
    job = chat(return_token_ids=True)
    assert job.params["echo"] is True
    assert not job.echo


def test_fields_that_nobody_knows_are_ignored() -> None:
    """OpenAI's clients send fields that are newer than any server."""
    assert completion(brand_new={"a": 1}, user="u", store=False).params == {"max_tokens": 16}


REFUSED = [
    # field of the wrong type
    ({"temperature": "0.5"}, "temperature", "number"),
    ({"n": True}, "n", "integer"),
    ({"n": 1.5}, "n", "integer"),
    ({"stream": 1}, "stream", "boolean"),
    ({"stop": 5}, "stop", "string"),
    ({"stop": ["a", 5]}, "stop[1]", "string"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"1" * 5000: 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1", "number"),
    ({"model": 5}, "model", "string"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", "token id"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "boolean"),
    # what the wire could not carry
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": 2**32}, "max_tokens", "less than or equal to"),
    ({"seed": 2**64}, "seed", "less than or equal to"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    # what goes together with something else only
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
    ({"length_penalty": 2.0}, "length_penalty", "use_beam_search"),
    # what cannot be had
    ({"response_format": {"type": "json_object"}}, "response_format", "text"),
    ({"guided_json": {}}, "guided_json", "grammar"),
]
OF_COMPLETIONS = [
    ({"prompt": None}, "prompt", "a string"),
    ({"prompt": []}, "prompt", "a string"),
    ({"prompt": {"a": 1}}, "prompt", "a string"),
    ({"prompt": ["a", 1]}, "prompt[1]", "a string"),
    ({"prompt": [[1], "a"]}, "prompt[1]", "token ids"),
    ({"prompt": [1, "a"]}, "prompt[1]", "token id"),
    ({"prompt": [1, True]}, "prompt[1]", "token id"),
    ({"prompt": [[1], [2, -5]]}, "prompt[1][1]", "token id"),
    ({"prompt": [1.5]}, "prompt[0]", "token id"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"add_special_tokens": False}, "add_special_tokens", "true"),
]
OF_CHATS = [
    ({"messages": None}, "messages", "array"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": ["hi"]}, "messages[0]", ""),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "given"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role", "at least 1"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "string"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "image_url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "string",
    ),
    (
        {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
        "messages[0].content[0].type",
        "given",
    ),
    (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "not supported",
    ),
    ({"logprobs": 1}, "logprobs", "boolean"),
    ({"top_logprobs": 1}, "top_logprobs", "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"continue_final_message": True}, "continue_final_message", "template"),
]


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED + OF_COMPLETIONS)
def test_a_completions_refusal_names_the_parameter(
    fields: dict[str, Any], param: str, said: str
) -> None:
    """One line that begins with the parameter and says what it may be."""
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    check(caught.value, param, said)


@pytest.mark.parametrize(("fields", "param", "said"), REFUSED + OF_CHATS)
def test_a_chats_refusal_names_the_parameter(fields: dict[str, Any], param: str, said: str) -> None:
    """The same for a chat, down to the part of a message."""
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    check(caught.value, param, said)


def check(error: ApiError, param: str, said: str) -> None:
    assert error.status == 400
    assert error.kind == "invalid_request_error"
    assert error.param == param
    assert str(error).startswith(f"{param} ")
    assert said in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    "harmless",
    [
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"tool_choice": "none"},
        {"modalities": ["text"]},
        {"parallel_tool_calls": True},
        {"chat_template_kwargs": {}},
    ],
)
def test_values_that_ask_for_nothing_are_taken(harmless: dict[str, Any]) -> None:
    """Clients that always send a field do no harm."""
    assert chat(**harmless).params == {}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"prompt": "a"} trailing',
    ],
)
def test_bodies_that_are_no_json_object_are_refused(raw: bytes) -> None:
    """Whatever the bytes, the caller is told that they are no request."""
    with pytest.raises(ApiError) as caught:
        schema.parse(schema.CompletionBody, raw)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 300
