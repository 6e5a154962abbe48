"""The client for code without asyncio; the same surface as `AsyncClient`."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

from octavo_client import _admin, _protocol
from octavo_client._channel import DEFAULT_TARGET
from octavo_client._connection import Connection, ConnectionSettings
from octavo_client._retry import RetryPolicy, Turns
from octavo_client._session import Session, name_deadline
from octavo_client._state import Explanation, Snapshot
from octavo_client._status import error_from_status
from octavo_client._tracing import CallSpan
from octavo_client._types import (
    Completion,
    Event,
    GenerateParams,
    Health,
    Message,
    Model,
)
from octavo_client.errors import Cancelled, OctavoError

_T = TypeVar("_T")


class Client:
    """Talks to a scheduler, blocking; see `AsyncClient` for what each part means.

    Threads may share one client; a stream belongs to one thread, but any may cancel it.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout: float = 600.0,
        unary_timeout: float = 30.0,
        retry: RetryPolicy | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        on_retry: Callable[[OctavoError], None] | None = None,
        api_key: str | None = None,
        ca_file: str | Path | None = None,
        cert_file: str | Path | None = None,
        key_file: str | Path | None = None,
        server_name: str | None = None,
        allow_insecure_key: bool = False,
    ) -> None:
        settings = ConnectionSettings(
            target=target,
            credentials=credentials,
            api_key=api_key,
            ca_file=ca_file,
            cert_file=cert_file,
            key_file=key_file,
            server_name=server_name,
            allow_insecure_key=allow_insecure_key,
        )
        self._connection = Connection(settings)
        self._channel = self._connection.open(grpc.insecure_channel, grpc.secure_channel)
        self._target = self._connection.target
        self._timeout = timeout
        self._unary_timeout = unary_timeout
        self._policy = retry or RetryPolicy()
        self._on_retry = on_retry
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs, and hang up."""
        self._channel.close()

    def generate(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Message | Mapping[str, str]] | None = None,
        timeout: float | None = None,
        api_key: str | None = None,
        **params: Unpack[GenerateParams],
    ) -> Completion:
        """Generate, and return the whole answer; see `AsyncClient.generate`."""
        with self.stream(
            prompt, tokens=tokens, messages=messages, timeout=timeout, api_key=api_key, **params
        ) as stream:
            return stream.completion()

    def stream(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Message | Mapping[str, str]] | None = None,
        timeout: float | None = None,
        api_key: str | None = None,
        **params: Unpack[GenerateParams],
    ) -> Stream:
        """Generate, and iterate over the events as they come.

        Use it as a context manager, so that leaving early frees the request's blocks:
        `with client.stream("Once") as stream: for event in stream: ...`
        """
        request = _protocol.build_generate(prompt, tokens, messages, params)
        span = CallSpan.begin(request)
        metadata = self._connection.metadata(api_key) + span.headers
        return Stream(
            lambda message, seconds: self._inference.Generate(
                message, timeout=seconds, metadata=metadata
            ),
            Session(request, self._policy, has_replicas=self._connection.has_replicas, span=span),
            self._timeout if timeout is None else timeout,
            self._target,
            self._on_retry,
        )

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[Message | Mapping[str, str]] | None = None,
        model: str = "",
        timeout: float | None = None,
        api_key: str | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids that `generate` would use for text or messages."""
        request = _protocol.build_tokenize(text, messages, model)
        return tuple(self._unary(self._inference.Tokenize, request, timeout, api_key).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool = False,
        model: str = "",
        timeout: float | None = None,
        api_key: str | None = None,
    ) -> str:
        """Return the text of token ids."""
        request = _protocol.build_detokenize(token_ids, keep_special_tokens, model)
        return self._unary(self._inference.Detokenize, request, timeout, api_key).text

    def token_bytes(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool = False,
        model: str = "",
        timeout: float | None = None,
        api_key: str | None = None,
    ) -> tuple[bytes, ...]:
        """Return the bytes of each of at most 4096 ids; a character may be split over several.

        A special token has none, unless it is to be kept.
        """
        request = _protocol.build_detokenize(
            token_ids, keep_special_tokens, model, include_token_bytes=True
        )
        response = self._unary(self._inference.Detokenize, request, timeout, api_key)
        return tuple(response.token_bytes)

    def model(
        self, name: str = "", *, timeout: float | None = None, api_key: str | None = None
    ) -> Model:
        """Describe the model that is served."""
        request = inference_pb2.GetModelRequest(model=name)
        response = self._unary(self._inference.GetModel, request, timeout, api_key)
        return _protocol.parse_model(response)

    def snapshot(
        self,
        *,
        sequences: bool = False,
        blocks: bool = False,
        timeout: float | None = None,
        api_key: str | None = None,
    ) -> Snapshot:
        """Return the scheduler's state: pool, queue and, if asked, sequences and blocks."""
        request = admin_pb2.SnapshotRequest(include_sequences=sequences, include_blocks=blocks)
        response = self._unary(self._admin.Snapshot, request, timeout, api_key)
        return _admin.parse_snapshot(response.snapshot)

    def watch(
        self,
        *,
        interval: float = 0.5,
        sequences: bool = False,
        blocks: bool = False,
        timeout: float | None = None,
        api_key: str | None = None,
    ) -> Iterator[Snapshot]:
        """Yield a snapshot every `interval` seconds, until closed or `timeout` (None: never)."""
        request = _admin.build_watch(interval, sequences, blocks)
        metadata = self._connection.metadata(api_key)
        call: Any = self._admin.Watch(request, timeout=timeout, metadata=metadata)
        try:
            for response in call:
                yield _admin.parse_snapshot(response.snapshot)
        except grpc.RpcError as error:
            raise _translate(error, self._target) from None
        finally:
            call.cancel()

    def explain(
        self, request_id: str, *, timeout: float | None = None, api_key: str | None = None
    ) -> Explanation:
        """Tell what happened to a request, live or lately ended, and when.

        Raises: NotFound: if the scheduler does not know it, or has forgotten it.
        """
        request = _admin.build_explain(request_id)
        response = self._unary(self._admin.Explain, request, timeout, api_key)
        return _admin.parse_explanation(response)

    def health(
        self, service: str = "", *, timeout: float | None = None, api_key: str | None = None
    ) -> Health:
        """Return what the server says of itself; raises ConnectionFailed if nothing answers."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = self._unary(self._health.Check, request, timeout, api_key)
        return _protocol.parse_health(response.status)

    def _unary(
        self,
        method: Callable[..., _T],
        request: Any,
        timeout: float | None,
        api_key: str | None,
    ) -> _T:
        """Call once, and again while the service is only busy or away."""
        metadata = self._connection.metadata(api_key)
        seconds = self._unary_timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        turns = Turns(self._policy, has_replicas=self._connection.has_replicas)
        attempt = 1
        while True:
            try:
                left = max(deadline - time.monotonic(), 0.0)
                return method(request, timeout=left, metadata=metadata)
            except grpc.RpcError as failure:
                error = _translate(failure, self._target)
            error = name_deadline(error, time.monotonic(), deadline, seconds)
            if not self._policy.covers(error):
                raise error
            if turns.take(error):
                continue
            delay = self._policy.delay(attempt, error.retry_after)
            if attempt == self._policy.max_attempts or time.monotonic() + delay >= deadline:
                raise error
            time.sleep(delay)
            attempt += 1


class Stream:
    """Events of one request, in order. Iterate once; `with` cancels what is left."""

    def __init__(
        self,
        open_call: Callable[[inference_pb2.GenerateRequest, float], Any],
        session: Session,
        seconds: float,
        target: str,
        on_retry: Callable[[OctavoError], None] | None = None,
    ) -> None:
        self._open_call = open_call
        self._session = session
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._target = target
        self._on_retry = on_retry
        self._call: Any = None
        self._ready: deque[Event] = deque()
        self._ended = False
        self._cancelled = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while not self._ready:
            if self._ended or self._cancelled.is_set():
                raise StopIteration
            self._advance()
        return self._ready.popleft()

    def cancel(self) -> None:
        """Stop generating and free the blocks; iteration ends. Any thread may call it."""
        if self._ended:
            return
        self._session.cancel()
        self._cancelled.set()
        call = self._call
        if call is not None:
            call.cancel()

    def completion(self) -> Completion:
        """Read the rest, and return the whole answer; for streams not iterated before.

        Raises: Cancelled: if `cancel` came first.
        """
        builder = _protocol.CompletionBuilder()
        for event in self:
            builder.add(event)
        if self._cancelled.is_set():
            raise Cancelled("the stream was cancelled")
        return builder.build()

    def _advance(self) -> None:
        """Read one response, or go on to the next call; fill `_ready` or end."""
        if self._call is None:
            seconds = self._deadline - time.monotonic()
            self._call = self._open_call(self._session.next_request(), max(seconds, 0.0))
            if self._cancelled.is_set():  # cancelled from another thread, just before
                self._call.cancel()
        try:
            response = next(self._call, None)
            if response is None:
                self._end(self._session.finish())
            else:
                self._ready.extend(self._session.receive(response))
        except grpc.RpcError as failure:
            self._recover(_translate(failure, self._target))
        except OctavoError:
            self.cancel()
            raise

    def _recover(self, error: OctavoError) -> None:
        """Wait before the next call, or raise."""
        self._call = None
        if self._cancelled.is_set():
            return
        now = time.monotonic()
        error = name_deadline(error, now, self._deadline, self._seconds)
        try:
            delay = self._session.after_failure(error, now)
        except OctavoError:
            self._ended = True
            raise
        if delay is None:
            self._end(self._session.finish())
        elif time.monotonic() + delay >= self._deadline:
            self._ended = True
            self._session.give_up(error)
            raise error
        else:
            if self._on_retry is not None and self._session.is_new_outage:
                self._on_retry(error)
            self._cancelled.wait(delay)

    def _end(self, events: Iterable[Event]) -> None:
        self._ready.extend(events)
        self._ended = True


def _translate(failure: Any, target: str) -> OctavoError:
    """Read a grpc.RpcError; those of a call are its grpc.Call too."""
    code = failure.code()
    message = failure.details() or code.name
    return error_from_status(code, message, failure.trailing_metadata() or (), target)
