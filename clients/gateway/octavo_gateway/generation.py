"""From a job to an answer: the calls that it makes, and the events that come of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

from octavo_client import (
    AsyncClient,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateParams,
    Started,
    Usage,
)

from octavo_gateway.errors import SERVER_ERROR, ApiError, translated
from octavo_gateway.exchange import Exchange
from octavo_gateway.metrics import Progress
from octavo_gateway.places import Places
from octavo_gateway.served import Served
from octavo_gateway.translate import Call, Job

MAX_CALLS_AT_ONCE = 64  # of one HTTP request with many prompts
_MAX_EVENTS_WAITING = 64

Payload = dict[str, Any]
_Queue = asyncio.Queue[tuple[int, Event] | BaseException | None]


class Renderer(Protocol):
    """Writes the answer to one job in the form of its endpoint.

    Attributes:
        answer_id: that the caller sees; the scheduler's logs have it too.
    """

    answer_id: str

    def started(self, call: int) -> Iterable[Payload]:
        """Chunks for a call that was accepted."""

    def delta(self, call: int, delta: Delta) -> Iterable[Payload]:
        """Chunks for more of one choice."""

    def finished(self, call: int, finished: Finished) -> Iterable[Payload]:
        """Chunks for the end of one choice."""

    def usage(self, usage: Payload) -> Payload:
        """The chunk that carries the usage alone."""

    def whole(self, completions: Sequence[Completion], usage: Payload) -> Payload:
        """The whole answer, of one completion per call."""


class Generation:
    """One job at work: its calls, on behalf of the caller's key and within a deadline."""

    def __init__(
        self,
        client: AsyncClient,
        job: Job,
        renderer: Renderer,
        *,
        served: Served,
        api_key: str | None,
        timeout: float,
        progress: Progress,
    ) -> None:
        self._client = client
        self._job = job
        self._renderer = renderer
        self._vocabulary = served.vocabulary
        self._api_key = api_key
        self._timeout = timeout
        self._progress = progress
        self._names_tokens = job.logprobs is not None or job.prompt_logprobs is not None

    async def stream(self, exchange: Exchange) -> None:
        """Answer as events come.

        Raises:
            ApiError: for what any of the calls failed with.
        """
        await self._learn_tokens()
        renderer = self._renderer
        usages: list[Usage] = []
        async with aclosing(self._events()) as events:
            async for call, event in events:
                match event:
                    case Started():
                        payloads = renderer.started(call)
                    case Delta():
                        payloads = self._delta(call, event)
                    case Finished():
                        payloads = renderer.finished(call, _sound(event))
                    case Usage():
                        usages.append(event)
                        continue
                for payload in payloads:
                    await exchange.event(payload)
        usage = _sum(usages)
        self._progress.ended(usage)
        if self._job.include_usage:
            await exchange.event(renderer.usage(usage))
        await exchange.end_events()

    async def _learn_tokens(self) -> None:
        """See to it that the answer can name tokens, before it begins."""
        if self._names_tokens:
            with translated(self._job.calls[0].names):
                await self._vocabulary.fetch_all(self._api_key)

    def _delta(self, call: int, delta: Delta) -> Iterable[Payload]:
        if not delta.is_prompt:
            self._progress.received(len(delta.token_ids))
        return self._renderer.delta(call, delta)

    async def whole(self, exchange: Exchange) -> None:
        """Answer once everything is there.

        Raises:
            ApiError: for what any of the calls failed with.
        """
        await self._learn_tokens()
        places = Places(MAX_CALLS_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(places.run(partial(self._complete, number, call)))
                    for number, call in enumerate(self._job.calls)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        completions = [task.result() for task in tasks]
        usage = _sum([completion.usage for completion in completions])
        self._progress.ended(usage)
        await exchange.answer(self._renderer.whole(completions, usage))

    async def _complete(self, number: int, call: Call) -> Completion:
        with translated(call.names):
            completion = await self._client.generate(
                **call.source,
                timeout=self._timeout,
                api_key=self._api_key,
                **self._params(number),
            )
        for choice in completion.choices:
            _check(choice.finish_reason, choice.error)
            self._progress.received(len(choice.token_ids))
        return completion

    async def _events(self) -> AsyncGenerator[tuple[int, Event]]:
        """Yield the events of all calls, each with its call's number."""
        calls = self._job.calls
        if len(calls) == 1:
            async with aclosing(self._events_of(0, calls[0])) as events:
                async for event in events:
                    yield 0, event
            return
        # Bounded, so that a slow reader slows the calls and nothing piles up here.
        queue: _Queue = asyncio.Queue(_MAX_EVENTS_WAITING)
        pump = asyncio.create_task(self._pump(calls, queue))
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def _pump(self, calls: Sequence[Call], queue: _Queue) -> None:
        """Run all calls and gather their events; the last item is None, or what went wrong."""
        places = Places(MAX_CALLS_AT_ONCE)

        async def run(number: int, call: Call) -> None:
            async with aclosing(self._events_of(number, call)) as events:
                async for event in events:
                    await queue.put((number, event))

        try:
            async with asyncio.TaskGroup() as group:
                for number, call in enumerate(calls):
                    group.create_task(places.run(partial(run, number, call)))
        except BaseExceptionGroup as failures:
            await queue.put(failures.exceptions[0])
        else:
            await queue.put(None)

    async def _events_of(self, number: int, call: Call) -> AsyncGenerator[Event]:
        with translated(call.names):
            async with self._client.stream(
                **call.source,
                timeout=self._timeout,
                api_key=self._api_key,
                **self._params(number),
            ) as stream:
                async for event in stream:
                    yield event

    def _params(self, number: int) -> GenerateParams:
        """Give one call's parameters, under an id that leads from our log to the scheduler's."""
        request_id = f"{self._renderer.answer_id}.{number}"
        return {**self._job.params, "request_id": request_id}


def _sound(finished: Finished) -> Finished:
    _check(finished.reason, finished.error)
    return finished


def _check(reason: FinishReason, error: str) -> None:
    """Fail if a choice has no proper end: OpenAI's clients know stop and length only."""
    if reason in (FinishReason.STOP, FinishReason.LENGTH):
        return
    message = error or "the service gave the request up"
    raise ApiError(500, message, kind=SERVER_ERROR, code="internal_error")


def _sum(usages: Sequence[Usage]) -> Payload:
    prompt = sum(usage.num_prompt_tokens for usage in usages)
    completion = sum(usage.num_completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_prompt_tokens for usage in usages)
        },
    }
