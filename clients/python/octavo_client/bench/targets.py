"""Where requests go: Octavo's gRPC, or any server that speaks OpenAI's completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from octavo_client.bench.measure import Record
from octavo_client.errors import ConnectionFailed, OctavoError

if TYPE_CHECKING:
    import httpx

    from octavo_client import AsyncClient, GenerateParams, Snapshot


@dataclass(frozen=True, slots=True)
class Sampling:
    """How all requests of a run are answered. n above 1 samples at temperature 1, seeded."""

    n: int = 1
    beam_width: int = 0
    timeout_seconds: float = 600.0

    @property
    def num_choices(self) -> int:
        """Choices that come back for each request."""
        return self.n


class Target(Protocol):
    """A server under load."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    async def describe(self) -> dict[str, Any]:
        """Say what is served, for the report; fails if nothing answers."""

    async def snapshot(self) -> Snapshot | None:
        """Return the scheduler's counters; None from a server that has none."""

    async def send(self, record: Record, clock: Callable[[], float]) -> None:
        """Send record.request, and note in the record what comes back and when.

        Raises: OctavoError: if the request failed.
        """


class GrpcTarget:
    """A scheduler, through the SDK with its retries off: a refusal is to be seen."""

    def __init__(
        self, target: str, sampling: Sampling, connection: Mapping[str, Any] | None = None
    ) -> None:
        self._target = target
        self._sampling = sampling
        self._connection = connection or {}
        self._client: AsyncClient | None = None

    async def __aenter__(self) -> Self:
        from octavo_client import NO_RETRIES, AsyncClient

        self._client = AsyncClient(
            self._target,
            timeout=self._sampling.timeout_seconds,
            retry=NO_RETRIES,
            **self._connection,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._client is not None:
            await self._client.close()

    async def describe(self) -> dict[str, Any]:
        """GetModel, as values."""
        assert self._client is not None
        return asdict(await self._client.model())

    async def snapshot(self) -> Snapshot | None:
        """Return the scheduler's counters."""
        assert self._client is not None
        return await self._client.snapshot()

    async def send(self, record: Record, clock: Callable[[], float]) -> None:
        """Stream one request."""
        from octavo_client import Beam, Delta, Finished

        assert self._client is not None
        length = record.request.num_output_tokens
        params: GenerateParams = {"max_tokens": length, "ignore_eos": True}
        if self._sampling.beam_width:
            params["beam"] = Beam(self._sampling.beam_width)
        elif self._sampling.n == 1:
            params["temperature"] = 0.0
        else:
            params["temperature"] = 1.0
            params["seed"] = len(record.request.prompt)
        params["n"] = self._sampling.n
        num_tokens = 0
        stream = self._client.stream(tokens=record.request.prompt, **params)
        record.sent_at = clock()
        async with stream:
            async for event in stream:
                if isinstance(event, Delta):
                    record.add(event.index, clock(), len(event.token_ids))
                elif isinstance(event, Finished):
                    num_tokens += event.num_tokens
                    if event.error:
                        record.error = event.error
        record.num_output_tokens = num_tokens


class OpenAITarget:
    """A server of /v1/completions that streams by SSE.

    Prompts go as token ids. ignore_eos and min_tokens are extensions that vLLM, llama.cpp
    and others understand. One chunk counts as one token, unless it says (token_ids, an
    extension) that it carries more; the whole length is the server's own usage.
    """

    def __init__(self, base_url: str, sampling: Sampling, *, model: str | None = None) -> None:
        root = base_url.rstrip("/")
        self._base = root if root.endswith("/v1") else f"{root}/v1"
        self._sampling = sampling
        self._model = model
        self._http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        import httpx

        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(self._sampling.timeout_seconds),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=1000),
            trust_env=not self._base.startswith(("http://127.", "http://localhost")),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def describe(self) -> dict[str, Any]:
        """The first model of /v1/models, unless one was named."""
        import httpx

        assert self._http is not None
        try:
            response = await self._http.get(f"{self._base}/models")
            response.raise_for_status()
            served = [str(model["id"]) for model in response.json()["data"]]
        except httpx.TransportError as error:
            raise ConnectionFailed(f"nothing answers at {self._base}: {error}.") from error
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            raise OctavoError(
                f"{self._base}/models is no OpenAI list of models: {error}"
            ) from error
        if self._model is None:
            if not served:
                raise OctavoError(f"{self._base} serves no model: name one with --model")
            self._model = served[0]
        return {"model": self._model, "served": served}

    async def snapshot(self) -> Snapshot | None:
        """Return nothing: this API has no such counters."""
        return None

    async def send(self, record: Record, clock: Callable[[], float]) -> None:
        """Stream one request."""
        import httpx

        assert self._http is not None
        body = self._body(record)
        record.sent_at = clock()
        try:
            async with self._http.stream(
                "POST", f"{self._base}/completions", json=body
            ) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode("utf-8", "replace")
                    raise OctavoError(f"HTTP {response.status_code}: {text[:300]}")
                async for line in response.aiter_lines():
                    if line.startswith("data:"):
                        self._take(line[5:].strip(), record, clock())
        except httpx.HTTPError as error:
            raise OctavoError(f"{type(error).__name__}: {error}") from error

    def _body(self, record: Record) -> dict[str, Any]:
        length = record.request.num_output_tokens
        sampled = self._sampling.n > 1
        return {
            "model": self._model,
            "prompt": list(record.request.prompt),
            "max_tokens": length,
            "min_tokens": length,
            "ignore_eos": True,
            "n": self._sampling.n,
            "temperature": 1.0 if sampled else 0.0,
            "seed": len(record.request.prompt),
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    @staticmethod
    def _take(data: str, record: Record, now: float) -> None:
        """Note one SSE event."""
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except json.JSONDecodeError:
            raise OctavoError(f"the server sent no JSON: {data[:100]!r}") from None
        if chunk.get("error"):
            raise OctavoError(str(chunk["error"]))
        for choice in chunk.get("choices") or ():
            token_ids = choice.get("token_ids")
            if token_ids is not None:
                num_tokens = len(token_ids)
            else:
                num_tokens = int(bool(choice.get("text")) or not choice.get("finish_reason"))
            record.add(int(choice.get("index", 0)), now, num_tokens)
        usage = chunk.get("usage")
        if usage:
            record.num_output_tokens = int(usage["completion_tokens"])


def open_target(
    target: str,
    sampling: Sampling,
    *,
    model: str | None,
    connection: Mapping[str, Any] | None = None,
) -> Target:
    """Choose by scheme: http(s):// is OpenAI's API, all else is Octavo's.

    `connection` is what `AsyncClient` takes to reach Octavo: TLS and the API key.

    Raises:
        OctavoError: if the target is neither, or cannot do what is asked.
    """
    if target.startswith(("http://", "https://")):
        if any((connection or {}).values()):
            raise OctavoError("certificates and keys are for grpc:// and grpcs:// targets")
        if sampling.beam_width:
            raise OctavoError("beam search has no OpenAI form: use a grpc:// target")
        return OpenAITarget(target, sampling, model=model)
    return GrpcTarget(target, sampling, connection)
