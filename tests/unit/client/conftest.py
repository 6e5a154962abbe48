"""A fake scheduler: a real gRPC server on a free port, with scripted failures.

It "generates" numbers: the token at position p of choice c is 100 * c + p + 1, and its text
is that number and a space. So any gap or repeat after a resume shows in the numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

Response = inference_pb2.GenerateResponse
SEED = 4242
NUM_PROMPT_TOKENS = 3


@dataclass
class Failure:
    """How one call ends: after so many deltas, with this status and these details."""

    code: grpc.StatusCode
    message: str = "scripted"
    after_deltas: int = 0
    details: tuple[Any, ...] = ()
    before_status: tuple[Response, ...] = ()  # sent just before the status
    started: bool = True  # whether Started is sent at all


@dataclass
class FakeScheduler:
    """State that tests script and inspect."""

    failures: list[Failure | None] = field(default_factory=list)  # one per Generate call
    delta_seconds: float = 0.0
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)  # one per Generate call; "": none
    cancelled: threading.Event = field(default_factory=threading.Event)
    unary_failures: list[Failure] = field(default_factory=list)
    num_unary_calls: int = 0
    target: str = ""
    has_chat_template: bool = True
    snapshot: admin_pb2.Snapshot = field(default_factory=admin_pb2.Snapshot)
    watch_authorizations: list[str] = field(default_factory=list)  # one per Watch call; "": none
    watch_failures: list[Failure] = field(default_factory=list)  # after so many snapshots
    watches_ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    before_snapshot: Callable[[], None] = lambda: None
    stories: dict[str, admin_pb2.ExplainResponse] = field(default_factory=dict)
    token_bytes: dict[int, bytes] = field(default_factory=dict)  # others: of the character
    override: Callable[[inference_pb2.GenerateRequest], list[Response]] | None = None


def started(request: inference_pb2.GenerateRequest) -> Response:
    seed = request.sampling.seed if request.sampling.HasField("seed") else SEED
    return Response(
        started=inference_pb2.Started(
            request_id=request.request_id or "drawn",
            model="fake",
            num_prompt_tokens=NUM_PROMPT_TOKENS,
            seed=seed,
            max_tokens=request.stopping.max_tokens,
        )
    )


def delta(index: int, position: int) -> Response:
    number = 100 * index + position + 1
    return Response(delta=inference_pb2.Delta(index=index, text=f"{number} ", token_ids=[number]))


def finished(index: int, num_tokens: int, reason: Any = types_pb2.FINISH_REASON_LENGTH) -> Response:
    return Response(
        finished=inference_pb2.Finished(index=index, num_tokens=num_tokens, reason=reason)
    )


async def _abort(context: aio.ServicerContext[Any, Any], failure: Failure) -> None:
    status = status_pb2.Status(code=failure.code.value[0], message=failure.message)
    for detail in failure.details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    await context.abort_with_status(rpc_status.to_status(status))


class _Inference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, fake: FakeScheduler) -> None:
        self._fake = fake

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Response]:
        fake = self._fake
        fake.requests.append(request)
        sent = dict(context.invocation_metadata())
        fake.authorizations.append(str(sent.get("authorization", "")))
        failure = fake.failures.pop(0) if fake.failures else None
        ended: list[bool] = []
        context.add_done_callback(lambda _: None if ended else fake.cancelled.set())
        if failure is None or failure.started:
            yield started(request)
        for num_sent, response in enumerate(self._body(request)):
            if failure is not None and num_sent == failure.after_deltas:
                break
            yield response
            await asyncio.sleep(fake.delta_seconds)
        if failure is not None:
            for response in failure.before_status:
                yield response
            ended.append(True)
            await _abort(context, failure)
        ended.append(True)
        yield Response(
            usage=inference_pb2.Usage(
                num_prompt_tokens=NUM_PROMPT_TOKENS,
                num_completion_tokens=request.stopping.max_tokens * max(request.n, 1),
            )
        )

    def _body(self, request: inference_pb2.GenerateRequest) -> list[Response]:
        if self._fake.override is not None:
            return self._fake.override(request)
        received = {choice.index: len(choice.token_ids) for choice in request.resume}
        num_tokens, choices = request.stopping.max_tokens, range(max(request.n, 1))
        body = [
            delta(index, position)
            for position in range(num_tokens)
            for index in choices
            if position >= received.get(index, 0)
        ]
        return [*body, *(finished(index, num_tokens) for index in choices)]

    async def _unary(self, context: Any) -> None:
        self._fake.num_unary_calls += 1
        if self._fake.unary_failures:
            await _abort(context, self._fake.unary_failures.pop(0))

    async def Tokenize(self, request: Any, context: Any) -> Any:
        await self._unary(context)
        text = request.text or "".join(turn.content for turn in request.chat.messages)
        return inference_pb2.TokenizeResponse(token_ids=[ord(letter) for letter in text])

    async def Detokenize(self, request: Any, context: Any) -> Any:
        await self._unary(context)
        response = inference_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))
        if request.include_token_bytes:
            response.token_bytes.extend(map(self._token_bytes, request.token_ids))
        return response

    def _token_bytes(self, token_id: int) -> bytes:
        return self._fake.token_bytes.get(token_id) or chr(token_id).encode()

    async def GetModel(self, request: Any, context: Any) -> Any:
        await self._unary(context)
        return inference_pb2.GetModelResponse(
            model="fake",
            fingerprint="f00d",
            max_model_len=512,
            vocab_size=49152,
            eos_token_ids=[2],
            has_chat_template=self._fake.has_chat_template,
            kv_capacity_tokens=1024,
            dtype="bfloat16",
        )


class _Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, fake: FakeScheduler) -> None:
        self._fake = fake

    async def Snapshot(self, request: Any, context: Any) -> Any:
        return admin_pb2.SnapshotResponse(snapshot=self._fake.snapshot)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        fake = self._fake
        sent = dict(context.invocation_metadata())
        fake.watch_authorizations.append(str(sent.get("authorization", "")))
        failure = fake.watch_failures.pop(0) if fake.watch_failures else None
        num_sent = 0
        try:
            while failure is None or num_sent < failure.after_deltas:
                fake.before_snapshot()
                yield admin_pb2.WatchResponse(snapshot=fake.snapshot)
                num_sent += 1
                await asyncio.sleep(request.interval_ms / 1000)
            await _abort(context, failure)
        finally:
            fake.watches_ended.release()

    async def Explain(self, request: Any, context: Any) -> Any:
        if request.request_id not in self._fake.stories:
            message = f"request {request.request_id!r} is not among the latest 4096 here"
            await _abort(context, Failure(grpc.StatusCode.NOT_FOUND, message))
        return self._fake.stories[request.request_id]


@contextlib.contextmanager
def serving(port: int = 0) -> Iterator[FakeScheduler]:
    """A fake scheduler that listens (0: anywhere), with a thread and a loop of its own."""
    state = FakeScheduler()
    ready, loop = threading.Event(), asyncio.new_event_loop()
    servers: list[aio.Server] = []

    async def start() -> None:
        server = aio.server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(_Inference(state), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(_Admin(state), server)
        checks = health.aio.HealthServicer()
        await checks.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        state.target = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
        await server.start()
        servers.append(server)
        ready.set()

    def serve() -> None:
        loop.create_task(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield state
    asyncio.run_coroutine_threadsafe(servers[0].stop(0), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


@pytest.fixture
def fake() -> Iterator[FakeScheduler]:
    """A fake scheduler that listens."""
    with serving() as state:
        yield state


@pytest.fixture
def serve_at() -> Callable[[int], contextlib.AbstractContextManager[FakeScheduler]]:
    """Another fake scheduler, at a port of the test's choice."""
    return serving


@pytest.fixture
def other() -> Iterator[FakeScheduler]:
    """Its replica."""
    with serving() as state:
        yield state


@pytest.fixture
def wire() -> Any:
    """The builders of this file, for tests that script a stream by hand."""

    class Wire:
        Failure = Failure
        Response = Response
        started = staticmethod(started)
        delta = staticmethod(delta)
        finished = staticmethod(finished)
        seed = SEED

        @staticmethod
        def retry_info(seconds: float) -> Any:
            whole = int(seconds)
            delay = duration_pb2.Duration(seconds=whole, nanos=round((seconds - whole) * 1e9))
            return error_details_pb2.RetryInfo(retry_delay=delay)

        @staticmethod
        def violation(path: str, description: str) -> Any:
            return error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field=path, description=description)
                ]
            )

        @staticmethod
        def info(reason: str, **metadata: str) -> Any:
            return error_details_pb2.ErrorInfo(reason=reason, domain="octavo", metadata=metadata)

    return Wire
