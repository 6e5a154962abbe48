"""Tests of octavo_gateway.app over a scripted scheduler: forms, errors, ends."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
import pytest
from octavo.v1 import inference_pb2, types_pb2
from octavo_gateway.app import Gateway

from tests.unit.client.gateway.conftest import events_of

Response = inference_pb2.GenerateResponse
HELLO = [{"role": "user", "content": "hello"}]


def chosen(token_id: int, *top: int) -> types_pb2.PositionLogprobs:
    def entry(each: int) -> types_pb2.TokenLogprob:
        return types_pb2.TokenLogprob(token_id=each, logprob=-each / 128)

    return types_pb2.PositionLogprobs(
        chosen=entry(token_id), top=[entry(each) for each in (top or (token_id,))]
    )


def delta(text: str, *token_ids: int, index: int = 0, prompt: bool = False) -> Response:
    positions = [chosen(each) for each in token_ids]
    if prompt:
        positions[0] = types_pb2.PositionLogprobs()
    return Response(
        delta=inference_pb2.Delta(
            index=index, text=text, token_ids=token_ids, logprobs=positions, is_prompt=prompt
        )
    )


async def test_a_completion_is_openais_object(http: httpx.AsyncClient, fake: Any) -> None:
    """Every choice of every prompt, numbered through, and one usage."""
    response = await http.post(
        "/v1/completions", json={"prompt": ["a", "b"], "n": 2, "max_tokens": 2}
    )
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    assert body["id"].startswith("cmpl-")
    assert body["system_fingerprint"] == "fp_f00d"
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["1 2 ", "101 102 "] * 2
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    ids = {request.request_id for request in fake.requests}
    assert ids == {f"{body['id']}.0", f"{body['id']}.1"}  # by which the scheduler's log has it
    assert body["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 8,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_chat_is_openais_object(http: httpx.AsyncClient) -> None:
    """A message by the assistant."""
    body = (
        await http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 2})
    ).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "1 2 ", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]


async def test_a_chat_streams_role_text_and_end(http: httpx.AsyncClient) -> None:
    """First the role, then text, then the reason, then the usage alone, then [DONE]."""
    response = await http.post(
        "/v1/chat/completions",
        json={
            "messages": HELLO,
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    *texts, usage = chunks
    assert [chunk["choices"][0]["delta"] for chunk in texts] == [
        {"role": "assistant", "content": ""},
        {"content": "1 "},
        {"content": "2 "},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in texts] == [None, None, None, "length"]
    assert {chunk["usage"] for chunk in texts} == {None}
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 5


async def test_a_completion_streams_several_prompts(http: httpx.AsyncClient) -> None:
    """Choices come mixed, each with its own number and its own end; no usage unless asked."""
    response = await http.post(
        "/v1/completions",
        json={"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 3, "stream": True},
    )
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)
    texts: dict[int, str] = {}
    ends: list[int] = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert texts == {i: ("1 2 3 ", "101 102 103 ")[i % 2] for i in range(6)}
    assert sorted(ends) == list(range(6))


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_shows_the_prompts_logprobs(
    http: httpx.AsyncClient, fake: Any, wire: Any, stream: bool
) -> None:
    """The echo with logprobs and no tokens to generate, as evaluations use it."""
    fake.override = lambda _: [delta("abc", 97, 98, 99, prompt=True), wire.finished(0, 0)]
    response = await http.post(
        "/v1/completions",
        json={"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream},
    )
    answer = events_of(response)[0] if stream else response.json()
    (choice,) = answer["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -98 / 128, -99 / 128],
        "tokens": ["a", "b", "c"],
        "top_logprobs": [None, {"b": -98 / 128}, {"c": -99 / 128}],
    }
    assert fake.requests[0].output.prompt_logprobs == 1


async def test_split_characters_have_bytes_in_a_stream(
    http: httpx.AsyncClient, fake: Any, wire: Any
) -> None:
    """A token that completes nothing has a chunk all the same: its log-probability."""
    fake.token_bytes = {200: b"\xc3", 201: b"\xa9"}
    fake.override = lambda _: [delta("", 200), delta("é", 201), wire.finished(0, 2)]
    response = await http.post(
        "/v1/chat/completions",
        json={"messages": HELLO, "logprobs": True, "top_logprobs": 1, "stream": True},
    )
    chunks = [chunk["choices"][0] for chunk in events_of(response)[1:3]]
    assert [chunk["delta"]["content"] for chunk in chunks] == ["", "é"]
    entries = [chunk["logprobs"]["content"][0] for chunk in chunks]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9]]
    assert entries[0]["top_logprobs"] == [
        {"token": "\\xc3", "logprob": -200 / 128, "bytes": [0xC3]}
    ]


async def test_tokens_are_looked_up_once(http: httpx.AsyncClient, fake: Any, wire: Any) -> None:
    """A token seen before costs no further call."""
    fake.override = lambda _: [delta("ab", 97, 98), delta("a", 97), wire.finished(0, 3)]
    body = {"prompt": "x", "logprobs": 1}
    await http.post("/v1/completions", json=body)
    calls = fake.num_unary_calls
    await http.post("/v1/completions", json=body)
    assert fake.num_unary_calls == calls


async def test_the_vocabulary_is_fetched_once_for_all(
    http: httpx.AsyncClient, fake: Any, wire: Any
) -> None:
    """Two that come together wait for one fetch: 49,152 ids, 4,096 a call."""
    fake.override = lambda _: [delta("a", 97), wire.finished(0, 1)]
    body = {"prompt": "x", "logprobs": 1}
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    most_model_calls = 2
    assert 12 < fake.num_unary_calls <= 12 + most_model_calls


@pytest.mark.parametrize("stream", [False, True])
async def test_a_key_that_is_revoked_meanwhile_cuts_no_answer(
    http: httpx.AsyncClient, fake: Any, wire: Any, stream: bool
) -> None:
    """Once a request is let in nothing more is asked of the scheduler with its key."""

    def revoke(_: Any) -> list[Any]:
        fake.unary_failures = [wire.Failure(grpc.StatusCode.UNAUTHENTICATED)] * 99
        return [delta("a", 97), delta("b", 98), wire.finished(0, 2)]

    fake.override = revoke
    body = {"prompt": "x", "logprobs": 1, "stream": stream}
    answer = await http.post("/v1/completions", json=body)
    if stream:
        assert events_of(answer)[-1] == "[DONE]"
    else:
        assert answer.json()["choices"][0]["logprobs"]["tokens"] == ["a", "b"]


async def test_a_fetch_that_fails_is_told_to_its_caller_alone(
    http: httpx.AsyncClient, fake: Any, wire: Any
) -> None:
    """Another one, with a better key, fetches what is missing."""
    fake.override = lambda _: [delta("a", 97), wire.finished(0, 1)]
    await http.post("/v1/completions", json={"prompt": "x"})  # the model is known from here on
    fake.unary_failures = [wire.Failure(grpc.StatusCode.UNAUTHENTICATED)]
    body = {"prompt": "x", "logprobs": 1}
    answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(2)))
    assert sorted(answer.status_code for answer in answers) == [200, 401]
    assert len(fake.requests) == 2


async def test_extensions_show_token_ids_and_what_stopped(
    http: httpx.AsyncClient, fake: Any
) -> None:
    """return_token_ids shows the prompt's too, without echoing its text."""
    end = inference_pb2.Finished(index=0, reason=types_pb2.FINISH_REASON_STOP, stop="!")
    fake.override = lambda _: [
        delta("ab", 97, 98, prompt=True),
        delta("c", 99),
        Response(finished=end),
    ]
    body = {"prompt": "ab", "return_token_ids": True, "prompt_logprobs": 1}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    assert choice["text"] == "c"
    assert choice["prompt_token_ids"] == [97, 98]
    assert choice["token_ids"] == [99]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "!")
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1]["98"]["rank"] == 1
    chat = (
        await http.post("/v1/chat/completions", json={"messages": HELLO, "return_token_ids": True})
    ).json()
    assert chat["prompt_token_ids"] == [97, 98]
    assert chat["choices"][0]["token_ids"] == [99]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_an_http_status(
    http: httpx.AsyncClient, fake: Any, wire: Any, stream: bool
) -> None:
    """Before there is any text, a stream is refused as anything else is."""
    fake.failures = [
        wire.Failure(
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.temperature must be between 0 and 100, got 500",
            started=False,
            details=(wire.violation("sampling.temperature", "between 0 and 100"),),
        ),
        wire.Failure(
            grpc.StatusCode.RESOURCE_EXHAUSTED, started=False, details=(wire.retry_info(2.5),)
        ),
        wire.Failure(grpc.StatusCode.UNAVAILABLE, started=False),
    ]
    answers = [
        await http.post("/v1/completions", json={"prompt": "a", "stream": stream}) for _ in range(3)
    ]
    assert [answer.status_code for answer in answers] == [400, 429, 503]
    assert answers[0].json()["error"]["param"] == "temperature"
    assert answers[0].json()["error"]["message"].startswith("temperature must")
    assert answers[1].headers["retry-after"] == "3"
    assert len(fake.requests) == 3


async def test_an_error_in_mid_stream_is_the_last_event(
    http: httpx.AsyncClient, fake: Any, wire: Any
) -> None:
    """What came before it stays; no [DONE] claims that the answer is whole."""
    fake.failures = [wire.Failure(grpc.StatusCode.INTERNAL, "broken", after_deltas=1)]
    response = await http.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True}
    )
    assert response.status_code == 200
    first, last = events_of(response)
    assert first["choices"][0]["text"] == "1 "
    assert last == {
        "error": {
            "message": "broken",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }


async def test_one_bad_prompt_of_several_is_named(
    http: httpx.AsyncClient, fake: Any, wire: Any
) -> None:
    """The others are cancelled, and the refusal says which it was."""
    failure = wire.Failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        "text must be at most 5 tokens long (the context is 6 tokens)",
        started=False,
        details=(wire.violation("text", "at most 5 tokens long"),),
    )
    fake.failures = [failure]
    response = await http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 300})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] in ("prompt[0]", "prompt[1]")
    assert error["code"] == "context_length_exceeded"


async def test_unknown_paths_and_methods_are_told_in_form(http: httpx.AsyncClient) -> None:
    """OpenAI's clients read errors from JSON only."""
    unknown = await http.post("/v1/embeddings", json={})
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "unknown_url"
    wrong = await http.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["type"] == "invalid_request_error"
    assert wrong.headers["x-request-id"]


async def test_a_body_that_is_too_large_is_refused(http: httpx.AsyncClient) -> None:
    """By what it says of itself, and by what comes where it says nothing."""

    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 1000

    for content in (b" " * 20_000, chunks()):
        response = await http.post("/v1/completions", content=content)
        assert response.status_code == 413
        assert "10000 bytes" in response.json()["error"]["message"]


async def test_a_key_is_passed_through(http: httpx.AsyncClient, fake: Any) -> None:
    """The scheduler sees the caller's key, and none where the caller has none."""
    body = {"prompt": "a", "max_tokens": 1}
    await http.post("/v1/completions", json=body, headers={"authorization": "Bearer my-key"})
    await http.post("/v1/completions", json={**body, "stream": True})
    assert fake.authorizations == ["Bearer my-key", ""]


@pytest.mark.parametrize("header", ["Basic abc", "Bearer", "Bearer ", "Bearer a b", "my-key"])
async def test_another_authorization_is_refused(http: httpx.AsyncClient, header: str) -> None:
    """401, saying what is expected; the header is not shown."""
    response = await http.post(
        "/v1/completions", json={"prompt": "a"}, headers={"authorization": header}
    )
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"


async def test_request_ids_come_back(http: httpx.AsyncClient) -> None:
    """The caller's own, or one that is drawn where it has none fit for a header."""
    for path in ("/v1/models", "/version", "/nowhere"):
        given = await http.get(path, headers={"x-request-id": "abc-1"})
        assert given.headers["x-request-id"] == "abc-1"
    for unfit in ("x" * 129, "a b"):
        drawn = await http.get("/version", headers={"x-request-id": unfit})
        assert drawn.headers["x-request-id"].startswith("req-")


async def test_models(http: httpx.AsyncClient, fake: Any, wire: Any) -> None:
    """The one that is served; another is not found."""
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 512)
    assert (await http.get("/v1/models/fake")).json() == model
    assert (await http.get("/v1/models/")).json()["data"] == [model]
    fake.unary_failures = [wire.Failure(grpc.StatusCode.NOT_FOUND, "model 'org/x' is not served")]
    missing = await http.get("/v1/models/org/x")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_tokenize_and_detokenize(http: httpx.AsyncClient) -> None:
    """In vLLM's form, both ways."""
    told = (await http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert told == {
        "count": 2,
        "max_model_len": 512,
        "tokens": [104, 233],
        "token_strs": ["h", "é"],
    }
    back = await http.post("/detokenize", json={"tokens": told["tokens"]})
    assert back.json() == {"prompt": "hé"}
    chat = (await http.post("/tokenize", json={"messages": HELLO})).json()
    assert chat["count"] == 5
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {}, "tokens"),
    ):
        refused = await http.post(path, json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param


async def test_health_follows_the_scheduler_and_the_drain(
    http: httpx.AsyncClient, gateway: Gateway
) -> None:
    """200 while both serve; from the begin of the drain on 503, and no new work."""
    assert (await http.get("/health")).status_code == 200
    await gateway.gate.drain(0)
    assert (await http.get("/health")).status_code == 503
    refused = await http.post("/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503
    assert refused.headers["retry-after"]


async def test_metrics_count_by_endpoint_and_status(http: httpx.AsyncClient) -> None:
    """As Prometheus reads it."""
    await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "stream": True})
    await http.post("/v1/completions", json={"prompt": 5})
    lines = (await http.get("/metrics")).text.splitlines()
    prefix = "octavo_gateway_"
    for line in (
        'requests_total{endpoint="/v1/completions",status="200"} 1.0',
        'requests_total{endpoint="/v1/completions",status="400"} 1.0',
        'generated_tokens_total{endpoint="/v1/completions"} 3.0',
        'prompt_tokens_total{endpoint="/v1/completions"} 3.0',
        'first_token_seconds_count{endpoint="/v1/completions"} 1.0',
        'request_seconds_count{endpoint="/v1/completions"} 2.0',
        "requests_in_flight 0.0",
    ):
        assert prefix + line in lines


async def test_pages_of_allowed_origins_may_call(http: httpx.AsyncClient) -> None:
    """A browser asks first; others are not let in."""
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    for origin, status in (("https://page.example", 200), ("https://other.example", 400)):
        response = await http.options("/v1/completions", headers={"origin": origin, **ask})
        assert response.status_code == status
