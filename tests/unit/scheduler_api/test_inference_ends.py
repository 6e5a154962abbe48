"""How calls of scheduler_svc.api.inference end: cancelled, refused, lost, drained."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from octavo.v1 import inference_pb2, types_pb2

from scheduler_svc.core.request import (
    FinishReason,
    Request,
)
from scheduler_svc.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    NeverFits,
    QueueFull,
    Unavailable,
)
from tests.support.events import ask, ends, out, script, text_of

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


async def test_a_cancelled_call_frees_its_request(service: Service, spell: Any) -> None:
    """The engine's stream is cancelled as soon as the client is gone."""
    script(service, [out(spell("a"))])
    call = service.stub.Generate(ask())
    async for event in call:
        if event.WhichOneof("event") == "delta":
            break
    call.cancel()
    await asyncio.wait_for(service.engine.streams[0].cancelled.wait(), 5)
    assert service.servicer.num_active == 0


async def test_a_client_that_does_not_read_is_cancelled_too(service: Service, spell: Any) -> None:
    """The service stops taking output for a client that takes none, and cancelling works
    while it waits.
    """

    def forever(_: Request) -> Any:
        while True:
            yield [out(spell("a") * 1000)]

    service.engine.script = forever
    call = service.stub.Generate(ask())
    await call.read()
    stream = service.engine.streams[0]
    num_before = -1
    for _ in range(40):
        if stream.num_received == num_before:
            break
        num_before = stream.num_received
        await asyncio.sleep(0.2)
    assert stream.num_received == num_before
    call.cancel()
    await asyncio.wait_for(stream.cancelled.wait(), 5)


async def test_a_client_that_takes_nothing_for_too_long_is_given_up(
    service: Service, spell: Any
) -> None:
    """Its blocks are freed, its call ends, and it is told why if it ever reads again."""

    def forever(_: Request) -> Any:
        while True:
            yield [out(spell("a") * 1000)]

    service.engine.script = forever
    service.servicer._reader_timeout_seconds = 0.5
    call = service.stub.Generate(ask(), timeout=60)
    await call.read()
    await asyncio.wait_for(service.engine.streams[0].cancelled.wait(), 20)
    async with asyncio.timeout(20):
        while service.servicer.num_active:
            await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError, match="took nothing for") as caught:
            while True:
                await call.read()
    assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_a_slow_client_that_takes_something_is_not_given_up(
    service: Service, spell: Any
) -> None:
    """The time counts from what it took last."""
    script(service, *([out(spell("a") * 1000)] for _ in range(300)))
    service.servicer._reader_timeout_seconds = 2.0
    call = service.stub.Generate(ask(), timeout=60)
    for _ in range(50):
        await call.read()
        await asyncio.sleep(0.1)
    assert service.servicer.num_active == 1
    assert not service.engine.streams[0].cancelled.is_set()
    call.cancel()


async def test_a_deadline_frees_its_request(service: Service, spell: Any) -> None:
    """The client gets DEADLINE_EXCEEDED, the core knew the deadline, blocks are freed."""
    script(service, [out(spell("a"))])
    _, error = await service.failing(ask(), timeout=0.3)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(service.engine.streams[0].cancelled.wait(), 5)
    request = service.engine.requests[0]
    assert request.deadline is not None
    assert 0 < request.deadline - request.arrival <= 0.3


async def test_every_ended_stream_is_cancelled_at_the_engine(service: Service, spell: Any) -> None:
    """A choice that the service ended itself leaves nothing behind."""
    script(service, [out(spell("a."))])
    await service.generate(ask(stopping={"stop": ["."]}))
    assert service.engine.streams[0].cancelled.is_set()


LOST = [
    (Unavailable("the executor is gone"), grpc.StatusCode.UNAVAILABLE, ERROR),
    (DeadlineExceeded("too late"), grpc.StatusCode.DEADLINE_EXCEEDED, CANCELLED),
    (RuntimeError("a secret of the service"), grpc.StatusCode.INTERNAL, ERROR),
]


@pytest.mark.parametrize(("error", "code", "reason"), LOST)
async def test_a_lost_request_finishes_every_choice_once(
    service: Service, spell: Any, error: Exception, code: grpc.StatusCode, reason: int
) -> None:
    """Choices that had ended keep their end; the others end with the error; then comes
    its status.
    """
    script(service, [out(spell("a"), 0, finish=FinishReason.LENGTH), out(spell("b"), 1)], error)
    events, status = await service.failing(ask(n=3))
    assert status.code() is code
    assert {index: end.reason for index, end in ends(events).items()} == {
        0: LENGTH,
        1: reason,
        2: reason,
    }
    assert service.engine.streams[0].cancelled.is_set()


async def test_an_internal_error_tells_nothing_but_the_request(
    service: Service, spell: Any
) -> None:
    """The client gets an id for the log, other requests are untouched."""
    script(service, RuntimeError("a secret of the service"))
    events, error = await service.failing(ask(request_id="r7"))
    assert "secret" not in str(error.details()) + str(events)
    rich = rpc_status.from_call(error)  # type: ignore[arg-type]  # an AioRpcError has what it reads
    info = error_details_pb2.ErrorInfo()
    assert rich.details[0].Unpack(info)
    assert info.metadata["request_id"] == "r7"
    script(service, [out(spell("a"), finish=FinishReason.LENGTH)])
    assert text_of(await service.generate(ask())) == "a"


async def test_a_poison_request_fails_alone_with_its_reason(service: Service, spell: Any) -> None:
    """A choice that the engine gave up ends with ERROR, and the call with INTERNAL."""
    script(service, [out([], finish=FinishReason.ERROR, error="crashed a step twice")])
    events, error = await service.failing(ask())
    assert ends(events)[0].error == "crashed a step twice"
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "crashed a step twice"


async def test_an_engine_that_ends_early_is_a_fault(service: Service) -> None:
    """No choice is left without its Finished."""
    script(service, [])
    events, error = await service.failing(ask(n=2))
    assert {end.reason for end in ends(events).values()} == {ERROR}
    assert len(ends(events)) == 2
    assert error.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DuplicateRequest("in use"), grpc.StatusCode.ALREADY_EXISTS),
        (NeverFits("too large"), grpc.StatusCode.FAILED_PRECONDITION),
        (QueueFull("full", 0.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Unavailable("no executor"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_a_refused_request_has_no_events(
    service: Service, error: Exception, code: grpc.StatusCode
) -> None:
    """What the engine refuses at once never started."""
    service.engine.error = error
    events, status = await service.failing(ask())
    assert (events, status.code()) == ([], code)
    assert service.servicer.num_active == 0


async def test_a_full_queue_refuses_before_the_prompt_costs_anything(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No prompt is tokenized for a request that is refused anyway; a wrong one is still told."""
    service.engine.full = QueueFull("full", 0.5)

    async def tokenize(*_: object) -> list[int]:
        raise AssertionError("the prompt was tokenized")

    monkeypatch.setattr(service.servicer._codec, "encode", tokenize)
    request = ask()
    request.text = "hello"
    events, status = await service.failing(request)
    assert (events, status.code()) == ([], grpc.StatusCode.RESOURCE_EXHAUSTED)
    _, status = await service.failing(ask(n=65))
    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_details_survive_the_wire(service: Service) -> None:
    """A client reads the field and the retry delay from the status."""
    _, error = await service.failing(ask(n=65))
    rich = rpc_status.from_call(error)  # type: ignore[arg-type]  # an AioRpcError has what it reads
    bad = error_details_pb2.BadRequest()
    assert rich.details[1].Unpack(bad)
    assert bad.field_violations[0].field == "n"
    service.engine.error = QueueFull("full", 0.5)
    _, error = await service.failing(ask())
    rich = rpc_status.from_call(error)  # type: ignore[arg-type]  # an AioRpcError has what it reads
    retry = error_details_pb2.RetryInfo()
    assert rich.details[1].Unpack(retry)
    assert retry.retry_delay.nanos == 500_000_000


async def test_draining_refuses_new_work_and_ends_none(service: Service, spell: Any) -> None:
    """A stream that was open goes on to its end."""
    script(service, [out(spell("a"))])
    events = []
    async for event in service.stub.Generate(ask()):
        events.append(event)
        if event.WhichOneof("event") == "delta" and len(events) == 2:
            service.servicer.begin_drain()
            _, error = await service.failing(ask())
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            last = [out(spell("b"), finish=FinishReason.LENGTH)]
            service.engine.streams[0].more.put_nowait(last)
    assert text_of(events) == "ab"
    assert ends(events)[0].reason == LENGTH


async def test_no_executor_is_unavailable(service: Service) -> None:
    """Generate says so; what needs only the tokenizer still works."""
    service.engine.limits = None
    _, error = await service.failing(ask())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert (await service.stub.Tokenize(inference_pb2.TokenizeRequest(text="hi"))).token_ids
    model = await service.stub.GetModel(inference_pb2.GetModelRequest())
    assert (model.max_model_len, model.kv_capacity_tokens) == (512, 0)


async def test_another_model_is_not_found(service: Service) -> None:
    """Every method says so, and takes the served name."""
    for method, request in (
        (service.stub.Tokenize, inference_pb2.TokenizeRequest(text="x", model="other")),
        (service.stub.Detokenize, inference_pb2.DetokenizeRequest(model="other")),
        (service.stub.GetModel, inference_pb2.GetModelRequest(model="other")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(request)  # type: ignore[operator]  # a union of three methods
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    _, error = await service.failing(ask(model="other"))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert (await service.stub.GetModel(inference_pb2.GetModelRequest(model="tiny"))).model


async def test_text_and_tokens_convert_both_ways(service: Service) -> None:
    """Tokenize gives what Generate would use, Detokenize its text."""
    ids = (await service.stub.Tokenize(inference_pb2.TokenizeRequest(text="hello 😀"))).token_ids
    back = await service.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[*ids, EOS]))
    assert back.text == "hello 😀"
    kept = await service.stub.Detokenize(
        inference_pb2.DetokenizeRequest(token_ids=[*ids, EOS], keep_special_tokens=True)
    )
    assert kept.text == "hello 😀<|end|>"
    assert list(kept.token_bytes) == []
    for keep, end in ((True, b"<|end|>"), (False, b"")):
        request = inference_pb2.DetokenizeRequest(
            token_ids=[*ids, EOS], keep_special_tokens=keep, include_token_bytes=True
        )
        parts = (await service.stub.Detokenize(request)).token_bytes
        assert len(parts) == len(ids) + 1
        assert b"".join(parts[:-1]) == "hello 😀".encode()
        assert parts[-1] == end
    with pytest.raises(grpc.aio.AioRpcError, match="token_ids"):
        await service.stub.Detokenize(
            inference_pb2.DetokenizeRequest(token_ids=[0] * 4097, include_token_bytes=True)
        )
    script(service, [out([EOS], finish=FinishReason.STOP)])
    await service.generate(ask("hello 😀"))
    assert service.engine.requests[0].prompt_tokens == list(ids)


async def test_chat_goes_through_the_template(service: Service) -> None:
    """Generate and Tokenize see the same conversation."""
    chat: Any = {"messages": [{"role": "user", "content": "hello"}]}
    ids = (await service.stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))).token_ids
    text = await service.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids))
    assert text.text == "user: hello\n"
    script(service, [out([EOS], finish=FinishReason.STOP)])
    await service.generate(inference_pb2.GenerateRequest(chat=chat))
    assert service.engine.requests[0].prompt_tokens == list(ids)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"text": ""}, "text"),
        ({}, "prompt"),
        ({"tokens": {}}, "tokens"),
        ({"tokens": {"ids": [1, 300]}}, "tokens.ids[1]"),
        ({"chat": {}}, "chat.messages"),
        ({"chat": {"messages": [{"content": "x"}]}}, "chat.messages[0].role"),
        ({"model": "x" * 257, "text": "x"}, "model"),
    ],
)
async def test_bad_prompts_name_their_field(
    service: Service, fields: dict[str, Any], field: str
) -> None:
    """An empty or impossible prompt is that caller's error alone."""
    _, error = await service.failing(inference_pb2.GenerateRequest(**fields))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    rich = rpc_status.from_call(error)  # type: ignore[arg-type]  # an AioRpcError has what it reads
    bad = error_details_pb2.BadRequest()
    assert rich.details[1].Unpack(bad)
    assert bad.field_violations[0].field == field


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_bytes_that_are_no_message_are_the_clients_error(
    service: Service, method: str
) -> None:
    """Bad UTF-8 is INVALID_ARGUMENT with the field, not INTERNAL."""
    number = {"Generate": b"\x1a", "Tokenize": b"\x12"}[method]
    path = f"/octavo.v1.InferenceService/{method}"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if method == "Generate":
            async for _ in service.channel.unary_stream(path)(number + b"\x02a\xff"):
                pass
        else:
            await service.channel.unary_unary(path)(number + b"\x02a\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "text must be valid UTF-8, got a bad byte at offset 1"


async def test_get_model_describes_what_is_served(service: Service) -> None:
    """The limits are those that hold: the lower of model's and executor's."""
    model = await service.stub.GetModel(inference_pb2.GetModelRequest())
    assert (model.model, model.fingerprint, model.dtype) == ("tiny", "f00d", "float32")
    assert (model.max_model_len, model.vocab_size, model.kv_capacity_tokens) == (200, 300, 4096)
    assert list(model.eos_token_ids) == [EOS]
    assert model.has_chat_template
