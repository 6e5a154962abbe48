"""The client for asyncio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

from octavo_client import _admin, _protocol
from octavo_client._async_stream import AsyncStream, translate
from octavo_client._channel import DEFAULT_TARGET
from octavo_client._connection import Connection, ConnectionSettings
from octavo_client._retry import RetryPolicy, Turns
from octavo_client._session import Session, name_deadline
from octavo_client._state import Explanation, Snapshot
from octavo_client._tracing import CallSpan
from octavo_client._types import (
    Completion,
    GenerateParams,
    Health,
    Message,
    Model,
)
from octavo_client.errors import OctavoError

_T = TypeVar("_T")


class AsyncClient:
    """Talks to a scheduler; `Client` is the same for code without asyncio.

    Every call has a deadline that spans its retries. Calls that the service did not run
    are retried; streams that break are resumed (see `RetryPolicy`).

    Args:
        target: HOST:PORT, grpc://HOST:PORT, grpcs://HOST:PORT (TLS) or gRPC's own forms.
            Replicas are the addresses of one name, or a list of IP addresses: "10.0.0.1:50051,
            10.0.0.2:50051". With TLS a list needs server_name. Calls go to all of them in turn;
            RetryPolicy says what becomes of those that fail.
        timeout: deadline in seconds of `generate` and `stream`, unless the call gives one.
        unary_timeout: the same for all other calls.
        retry: bounds of retrying; None: RetryPolicy's defaults.
        credentials: gRPC's own, instead of the files below.
        on_retry: called when a stream broke and will be retried or resumed, once per outage,
            with what broke it.
        api_key: sent with every call that brings none of its own. It is refused where it
            would travel unencrypted to another machine.
        ca_file: PEM file of the CAs that the server's certificate must come from, and with it
            TLS; without it grpcs:// trusts the public CAs that gRPC brings.
        cert_file, key_file: PEM files of the client's certificate, where the server asks.
        server_name: that the server's certificate carries, where it is not the target's host.
        allow_insecure_key: send keys unencrypted all the same.

    What is None is read from OCTAVO_API_KEY, OCTAVO_CA_FILE, OCTAVO_CERT_FILE and
    OCTAVO_KEY_FILE; "" is none. Files are read when the client is made.
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
        self._channel = self._connection.open(aio.insecure_channel, aio.secure_channel)
        self._target = self._connection.target
        self._timeout = timeout
        self._unary_timeout = unary_timeout
        self._policy = retry or RetryPolicy()
        self._on_retry = on_retry
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what still runs, and hang up."""
        await self._channel.close(None)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Message | Mapping[str, str]] | None = None,
        timeout: float | None = None,
        api_key: str | None = None,
        **params: Unpack[GenerateParams],
    ) -> Completion:
        """Generate, and return the whole answer.

        Args:
            prompt: plain text to continue; or
            tokens: token ids to continue; or
            messages: a conversation to answer.
            timeout: deadline in seconds.
            api_key: of this call, instead of the client's own; "" sends none.
            params: see `GenerateParams`.
        Raises: OctavoError: one of the tree in `octavo_client.errors`.
        """
        async with self.stream(
            prompt, tokens=tokens, messages=messages, timeout=timeout, api_key=api_key, **params
        ) as stream:
            return await stream.completion()

    def stream(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        messages: Sequence[Message | Mapping[str, str]] | None = None,
        timeout: float | None = None,
        api_key: str | None = None,
        **params: Unpack[GenerateParams],
    ) -> AsyncStream:
        """Generate, and iterate over the events as they come.

        Use it as a context manager, so that leaving early frees the request's blocks:
        `async with client.stream("Once") as stream: async for event in stream: ...`
        """
        request = _protocol.build_generate(prompt, tokens, messages, params)
        span = CallSpan.begin(request)
        metadata = self._connection.metadata(api_key) + span.headers
        return AsyncStream(
            lambda message, seconds: self._inference.Generate(
                message, timeout=seconds, metadata=metadata
            ),
            Session(request, self._policy, has_replicas=self._connection.has_replicas, span=span),
            self._timeout if timeout is None else timeout,
            self._target,
            self._on_retry,
        )

    async def tokenize(
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
        response = await self._unary(self._inference.Tokenize, request, timeout, api_key)
        return tuple(response.token_ids)

    async def detokenize(
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
        return (await self._unary(self._inference.Detokenize, request, timeout, api_key)).text

    async def token_bytes(
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
        response = await self._unary(self._inference.Detokenize, request, timeout, api_key)
        return tuple(response.token_bytes)

    async def model(
        self, name: str = "", *, timeout: float | None = None, api_key: str | None = None
    ) -> Model:
        """Describe the model that is served."""
        request = inference_pb2.GetModelRequest(model=name)
        response = await self._unary(self._inference.GetModel, request, timeout, api_key)
        return _protocol.parse_model(response)

    async def snapshot(
        self,
        *,
        sequences: bool = False,
        blocks: bool = False,
        timeout: float | None = None,
        api_key: str | None = None,
    ) -> Snapshot:
        """Return the scheduler's state: pool, queue and, if asked, sequences and blocks."""
        request = admin_pb2.SnapshotRequest(include_sequences=sequences, include_blocks=blocks)
        response = await self._unary(self._admin.Snapshot, request, timeout, api_key)
        return _admin.parse_snapshot(response.snapshot)

    async def watch(
        self,
        *,
        interval: float = 0.5,
        sequences: bool = False,
        blocks: bool = False,
        timeout: float | None = None,
        api_key: str | None = None,
    ) -> AsyncGenerator[Snapshot]:
        """Yield a snapshot every `interval` seconds, until closed or `timeout` (None: never)."""
        request = _admin.build_watch(interval, sequences, blocks)
        metadata = self._connection.metadata(api_key)
        call = self._admin.Watch(request, timeout=timeout, metadata=metadata)
        try:
            async for response in call:
                yield _admin.parse_snapshot(response.snapshot)
        except aio.AioRpcError as error:
            raise translate(error, self._target) from None
        finally:
            call.cancel()

    async def explain(
        self, request_id: str, *, timeout: float | None = None, api_key: str | None = None
    ) -> Explanation:
        """Tell what happened to a request, live or lately ended, and when.

        Raises: NotFound: if the scheduler does not know it, or has forgotten it.
        """
        request = _admin.build_explain(request_id)
        response = await self._unary(self._admin.Explain, request, timeout, api_key)
        return _admin.parse_explanation(response)

    async def health(
        self, service: str = "", *, timeout: float | None = None, api_key: str | None = None
    ) -> Health:
        """Return what the server says of itself; raises ConnectionFailed if nothing answers."""
        request = health_pb2.HealthCheckRequest(service=service)
        response = await self._unary(self._health.Check, request, timeout, api_key)
        return _protocol.parse_health(response.status)

    async def _unary(
        self,
        method: Callable[..., Awaitable[_T]],
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
                return await method(request, timeout=left, metadata=metadata)
            except aio.AioRpcError as failure:
                error = translate(failure, self._target)
            error = name_deadline(error, time.monotonic(), deadline, seconds)
            if not self._policy.covers(error):
                raise error
            if turns.take(error):
                continue
            delay = self._policy.delay(attempt, error.retry_after)
            if attempt == self._policy.max_attempts or time.monotonic() + delay >= deadline:
                raise error
            await asyncio.sleep(delay)
            attempt += 1
