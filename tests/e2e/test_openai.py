"""OpenAI's own client, and raw HTTP, against scheduler, executor and gateway as processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from octavo_client import AsyncClient, Beam

from tests.e2e.api_keys import Keys, make_keys
from tests.e2e.conftest import Serve, Served
from tests.e2e.waiting import until_free

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "smollm2-135m-instruct"
COUNT = "1, 2, 3, 4,"
QUESTION: list[Any] = [{"role": "user", "content": "Name three colours."}]
LONG = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    """API keys; the operator's is in the environment, as Octavo's own clients find it.

    The gateway's process has it there too, and must not lend it to anybody.
    """
    made = make_keys(tmp_path_factory.mktemp("keys") / "keys.toml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_API_KEY", made.operator)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(serve: Serve, keys: Keys) -> AsyncIterator[Served]:
    """One stack with a gateway for all tests of this file."""
    async with serve(
        dtype="float32",
        block_size=16,
        num_blocks=400,
        http_listen="127.0.0.1:0",
        scheduler_args=("--api-keys", str(keys.file)),
    ) as pair:
        yield pair


@pytest.fixture
def client(served: Served) -> AsyncClient:
    """Octavo's own client, to compare with and to look at the pool."""
    return served[0]


@pytest_asyncio.fixture(loop_scope="module")
async def ai(served: Served, keys: Keys) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client, as anybody would set it up."""
    url = f"{served[1].http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=keys.user, max_retries=0) as own:
        yield own


@pytest_asyncio.fixture(loop_scope="module")
async def http(served: Served, keys: Keys) -> AsyncIterator[httpx.AsyncClient]:
    """Plain HTTP."""
    async with plain(served[1].http_url, keys.user) as own:
        yield own


def plain(url: str, key: str) -> httpx.AsyncClient:
    """A client of plain HTTP that shows a key."""
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=60, trust_env=False)


async def test_a_completion_is_what_the_sdk_gives(
    ai: openai.AsyncOpenAI, client: AsyncClient
) -> None:
    """Text, reason and usage agree; so do the texts of several prompts at once."""
    own = await client.generate(COUNT, max_tokens=8, temperature=0)
    answer = await ai.completions.create(model=MODEL, prompt=COUNT, max_tokens=8, temperature=0)
    assert answer.choices[0].text == own.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == own.usage.num_prompt_tokens
    assert answer.usage.completion_tokens == 8
    tokens = await client.tokenize(COUNT)
    several = await ai.completions.create(
        model=MODEL, prompt=[list(tokens), list(tokens)], max_tokens=8, temperature=0, n=2
    )
    assert [choice.text for choice in several.choices] == [own.text] * 4
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


async def test_a_chat_by_the_blocking_client(
    served: Served, client: AsyncClient, keys: Keys
) -> None:
    """Whole and streamed, the same text; the usage comes once, last."""
    own = await client.generate(messages=QUESTION, max_tokens=10, temperature=0)

    def ask() -> tuple[Any, list[Any]]:
        url = f"{served[1].http_url}/v1"
        with openai.OpenAI(base_url=url, api_key=keys.user, max_retries=0) as blocking:
            request: dict[str, Any] = {
                "model": MODEL,
                "messages": QUESTION,
                "max_completion_tokens": 10,
                "temperature": 0,
            }
            whole = blocking.chat.completions.create(**request)
            stream = blocking.chat.completions.create(
                **request, stream=True, stream_options={"include_usage": True}
            )
            return whole, list(stream)

    whole, chunks = await asyncio.to_thread(ask)
    assert whole.choices[0].message.content == own.text
    assert whole.choices[0].message.role == "assistant"
    *texts, usage = chunks
    assert texts[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == own.text
    assert texts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert not any(chunk.choices[0].finish_reason for chunk in texts[:-1])
    assert usage.choices == []
    assert usage.usage.total_tokens == whole.usage.total_tokens


async def test_a_stream_is_framed_as_openai_frames_it(http: httpx.AsyncClient) -> None:
    """Byte for byte: data lines, a blank line after each, and [DONE]."""
    body = {"messages": QUESTION, "max_tokens": 3, "stream": True}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = response.content.split(b"\n\n")
    assert frames[-2:] == [b"data: [DONE]", b""]
    for frame in frames[:-2]:
        assert json.loads(frame.removeprefix(b"data: "))["object"] == "chat.completion.chunk"


async def test_a_seed_gives_the_same_choices_again(ai: openai.AsyncOpenAI) -> None:
    """Choices that differ, twice the same, whole and streamed."""
    request: dict[str, Any] = {
        "model": MODEL,
        "prompt": "The old lighthouse",
        "max_tokens": 6,
        "n": 3,
        "seed": -7,
        "temperature": 0.9,
    }
    once = await ai.completions.create(**request)
    again = await ai.completions.create(**request)
    texts = [choice.text for choice in once.choices]
    assert [choice.text for choice in again.choices] == texts
    assert len(set(texts)) > 1
    assert once.system_fingerprint == again.system_fingerprint
    streamed = ["", "", ""]
    async for chunk in await ai.completions.create(**request, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


async def test_a_stop_string_ends_before_the_match(ai: openai.AsyncOpenAI) -> None:
    """The text ends before it and the reason says so; an extension names it."""
    whole = await ai.completions.create(model=MODEL, prompt=COUNT, max_tokens=10, temperature=0)
    text = whole.choices[0].text
    stop = text[7:11]
    answer = await ai.completions.create(
        model=MODEL, prompt=COUNT, max_tokens=10, temperature=0, stop=["never", stop]
    )
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra == {"stop_reason": stop}


async def test_logprobs_of_a_completion(ai: openai.AsyncOpenAI) -> None:
    """Tokens join to the text, offsets point into it, and greedy tokens are the likeliest."""
    answer = await ai.completions.create(
        model=MODEL, prompt=COUNT, max_tokens=8, temperature=0, logprobs=3
    )
    shown, text = answer.choices[0].logprobs, answer.choices[0].text
    assert shown is not None
    assert shown.tokens and shown.text_offset and shown.token_logprobs and shown.top_logprobs
    assert "".join(shown.tokens) == text
    for token, offset in zip(shown.tokens, shown.text_offset, strict=True):
        assert text[offset:].startswith(token)
    for logprob, top in zip(shown.token_logprobs, shown.top_logprobs, strict=True):
        assert len(top) == 3
        assert max(top.values()) == logprob <= 0


async def test_logprobs_of_a_chat_have_the_bytes_of_half_a_character(
    ai: openai.AsyncOpenAI, client: AsyncClient
) -> None:
    """A token that is no text by itself has its bytes; those of all tokens join."""
    halves = await client.tokenize("😀")
    assert len(halves) > 1
    answer = await ai.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=1,
        logprobs=True,
        top_logprobs=1,
        extra_body={"allowed_token_ids": [halves[0]]},
    )
    assert answer.choices[0].logprobs is not None
    (entry,) = answer.choices[0].logprobs.content or ()
    assert bytes(entry.bytes or ()) == (await client.token_bytes(halves))[0]
    assert entry.token == "".join(f"\\x{byte:02x}" for byte in entry.bytes or ())
    assert "😀".encode().startswith(bytes(entry.bytes or ()))
    assert b"".join(await client.token_bytes(halves)) == "😀".encode()


async def test_scoring_as_evaluations_do_it(http: httpx.AsyncClient, client: AsyncClient) -> None:
    """Prompts as token ids, echoed with log-probabilities, as lm-evaluation-harness asks."""
    context, ending = "The capital of France is", " Paris, which lies on the Seine."
    prompts = [list(await client.tokenize(context + end)) for end in (ending, " made of cheese.")]
    num_context = len(await client.tokenize(context))
    for max_tokens in (0, 1):
        body = {
            "model": MODEL,
            "prompt": prompts,
            "temperature": 0,
            "max_tokens": max_tokens,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        answer = (await http.post("/v1/completions", json=body)).json()
        sums = []
        for prompt, choice in zip(prompts, answer["choices"], strict=True):
            shown = choice["logprobs"]
            assert len(shown["tokens"]) == len(prompt) + max_tokens
            assert shown["token_logprobs"][0] is None
            assert shown["top_logprobs"][0] is None
            end = len(prompt)
            sums.append(sum(shown["token_logprobs"][num_context:end]))
            own = await client.generate(tokens=prompt, max_tokens=0, prompt_logprobs=0)
            expected = sum(
                each.chosen.logprob for each in own.choices[0].prompt_logprobs[num_context:]
            )
            assert sums[-1] == pytest.approx(expected, abs=1e-3)
        assert sums[0] > sums[1]
        assert answer["choices"][0]["text"].startswith(context + ending)


async def test_extensions_of_other_servers(ai: openai.AsyncOpenAI, client: AsyncClient) -> None:
    """Beam search, the best of several, forced lengths and token ids, in extra_body."""
    own = await client.generate(COUNT, max_tokens=6, n=2, beam=Beam(3), ignore_eos=True)
    beams = await ai.completions.create(
        model=MODEL,
        prompt=COUNT,
        max_tokens=6,
        n=2,
        best_of=3,
        extra_body={"use_beam_search": True, "ignore_eos": True, "return_token_ids": True},
    )
    assert [choice.text for choice in beams.choices] == [choice.text for choice in own.choices]
    extra = beams.choices[0].model_extra or {}
    assert extra["token_ids"] == list(own.token_ids)
    assert extra["prompt_token_ids"] == list(await client.tokenize(COUNT))
    best = await ai.completions.create(
        model=MODEL, prompt=COUNT, max_tokens=4, best_of=4, seed=3, temperature=1.5
    )
    assert len(best.choices) == 1
    assert best.usage is not None
    assert best.usage.completion_tokens > 4
    forced = await ai.completions.create(
        model=MODEL,
        prompt="Good-bye.",
        max_tokens=12,
        extra_body={"min_tokens": 12, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1},
    )
    assert forced.usage is not None
    assert forced.usage.completion_tokens == 12


BAD = [
    ({"temperature": 500}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"logit_bias": {"60000": 1}}, "logit_bias"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
    ({"top_logprobs": 50, "logprobs": True}, "top_logprobs"),
    ({"n": 65}, "n"),
    ({"stop": [""]}, "stop[0]"),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"extra_body": {"priority": 1000}}, "priority"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
async def test_bad_parameters_are_named(
    ai: openai.AsyncOpenAI, fields: dict[str, Any], param: str
) -> None:
    """OpenAI's client raises BadRequestError with the parameter, streamed or not."""
    for stream in (False, True):
        request: dict[str, Any] = {"model": MODEL, "messages": QUESTION, **fields}
        with pytest.raises(openai.BadRequestError) as caught:
            await ai.chat.completions.create(**request, stream=stream)
        assert caught.value.param == param
        assert caught.value.type == "invalid_request_error"


async def test_errors_have_openais_classes(ai: openai.AsyncOpenAI) -> None:
    """A model that is not served, and prompts that can never fit."""
    with pytest.raises(openai.NotFoundError) as missing:
        await ai.completions.create(model="gpt-5", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await ai.models.retrieve("gpt-5")
    with pytest.raises(openai.NotFoundError):
        await ai.embeddings.create(model=MODEL, input="a")
    for prompt in ([7] * 9000, [7] * 7000):  # longer than the context; than the pool
        with pytest.raises(openai.BadRequestError) as long:
            await ai.completions.create(model=MODEL, prompt=prompt, max_tokens=10)
        assert long.value.code == "context_length_exceeded"
        assert long.value.param == "prompt"


async def test_keys_are_the_schedulers_matter(
    ai: openai.AsyncOpenAI, keys: Keys, served: Served
) -> None:
    """None, a wrong one, and one whose tenant may ask only once a minute."""
    for stream in (False, True):
        with pytest.raises(openai.AuthenticationError):
            await ai.with_options(api_key="wrong").completions.create(
                model=MODEL, prompt="a", stream=stream
            )
    with pytest.raises(openai.AuthenticationError):
        await ai.with_options(api_key="wrong").models.list()
    async with httpx.AsyncClient(base_url=served[1].http_url, trust_env=False) as nobody:
        response = await nobody.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
        assert (await nobody.get("/health")).status_code == 200
    guest = ai.with_options(api_key=keys.guest)
    await guest.completions.create(model=MODEL, prompt="a", max_tokens=1)
    with pytest.raises(openai.RateLimitError) as limited:
        await guest.completions.create(model=MODEL, prompt="a", max_tokens=1)
    assert int(limited.value.response.headers["retry-after"]) > 1


async def test_logprobs_need_no_second_request(ai: openai.AsyncOpenAI, keys: Keys) -> None:
    """A tenant with room for one request has them in a stream, texts of new tokens and all."""
    single = ai.with_options(api_key=keys.single)
    stream = await single.completions.create(
        model=MODEL, prompt="Zebras", max_tokens=3, logprobs=20, stream=True, temperature=0
    )
    tokens = []
    async for chunk in stream:
        shown = chunk.choices[0].logprobs
        tokens += (shown.tokens or []) if shown else []
    assert len(tokens) == 3


async def test_models_are_listed(ai: openai.AsyncOpenAI) -> None:
    """The one that is served, by list and by name."""
    (model,) = [model async for model in ai.models.list()]
    assert model.id == MODEL
    assert (await ai.models.retrieve(MODEL)).id == MODEL


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "\xff"}',
        b'{"prompt": NaN}',
        b"\x00" * 99,
        b"[" * 9999,
    ],
)
async def test_bytes_that_are_no_request(http: httpx.AsyncClient, content: bytes) -> None:
    """Whatever the bytes, it is the caller's fault and in OpenAI's form."""
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = await http.post(path, content=content)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_past_the_bound_is_refused(http: httpx.AsyncClient) -> None:
    """413 for five megabytes; the next request is answered."""
    response = await http.post("/v1/completions", content=b" " * (5 * 1024 * 1024))
    assert response.status_code == 413
    assert (await http.get("/health")).status_code == 200


async def test_a_stream_that_is_closed_gives_its_blocks_back(
    ai: openai.AsyncOpenAI, client: AsyncClient
) -> None:
    """A caller that leaves in mid-stream holds nothing any more."""
    stream = await ai.completions.create(
        model=MODEL, prompt="Once", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = aiter(stream)
    for _ in range(3):
        await anext(chunks)
    assert (await client.snapshot()).executors[0].pool.num_referenced > 0
    await stream.close()
    await until_free(client)


async def test_a_caller_that_does_not_wait_gives_its_blocks_back(
    http: httpx.AsyncClient, client: AsyncClient
) -> None:
    """The same where no answer has begun."""
    waiting = asyncio.create_task(http.post("/v1/completions", json=LONG))
    while not (await client.snapshot()).executors[0].num_running:
        await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await until_free(client)
    metrics = (await http.get("/metrics")).text
    assert 'octavo_gateway_requests_total{endpoint="/v1/completions",status="499"}' in metrics


async def test_tokens_of_texts_and_texts_of_tokens(
    http: httpx.AsyncClient, client: AsyncClient
) -> None:
    """As the scheduler would tokenize them; special tokens are shown."""
    answer = (await http.post("/tokenize", json={"prompt": COUNT, "model": MODEL})).json()
    assert tuple(answer["tokens"]) == await client.tokenize(COUNT)
    assert answer["max_model_len"] == 8192
    chat = (await http.post("/tokenize", json={"messages": QUESTION})).json()
    back = (await http.post("/detokenize", json={"tokens": chat["tokens"]})).json()
    assert "Name three colours.<|im_end|>" in back["prompt"]


async def test_the_console_takes_an_administrators_key(served: Served, keys: Keys) -> None:
    """It shows all tenants: without a key 401, with a tenant's 403. The page itself has no data."""
    url = served[1].http_url
    for key, status in (("", 401), (keys.user, 403), (keys.operator, 200)):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as own:
            assert (await own.get("/console")).status_code == 200
            async with own.stream("GET", "/console/watch") as answer:
                assert answer.status_code == status
            told = await own.get("/console/story", params={"request_id": "nobody"})
            assert told.status_code == (404 if status == 200 else status)
