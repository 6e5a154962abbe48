"""The output of one request on its way from the engine to whoever asked.

What the engine pushes between two calls of `receive` is coalesced: a slow reader gets
fewer, larger outputs and holds at most its own request's tokens, nobody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.request import FinishReason, PositionLogprobs, Request, SequenceOutput
from scheduler_svc.errors import OctavoError


@dataclass(slots=True)
class RequestStats:
    """How a request fares; seconds count from its acceptance."""

    cached_prompt_tokens: int = 0
    num_preemptions: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0


class TokenStream:
    """One request's choices: pushed by the engine, received by the servicer.

    Invariant: every choice gets exactly one output with a finish reason, unless the
    reader stopped it or the whole request was lost.
    """

    def __init__(
        self,
        request: Request,
        stop: Callable[[str, int], None],
        cancel: Callable[[str], None],
    ) -> None:
        """Start with all choices open."""
        self.request = request
        self.stats = RequestStats()
        self._stop = stop
        self._cancel = cancel
        num_choices = request.n if request.beam is not None else request.best_of
        self._open = set(range(num_choices))
        self._outputs: dict[int, SequenceOutput] = {}
        self._ready = asyncio.Event()
        self._error: OctavoError | None = None

    # -- the reader's side ---------------------------------------------------------

    async def receive(self) -> list[SequenceOutput]:
        """Wait for output; [] once every choice has ended.

        Raises:  OctavoError: if the request was lost.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            self._ready.clear()
            await self._ready.wait()
        outputs, self._outputs = self._outputs, {}
        return list(outputs.values())

    def stop(self, sample_index: int) -> None:
        """End a choice; no further output comes for it."""
        if sample_index in self._open:
            self._open.discard(sample_index)
            self._outputs.pop(sample_index, None)
            self._stop(self.request.request_id, sample_index)

    def cancel(self) -> None:
        """Give the request up; harmless at any time, any number of times."""
        if self._open:
            self._open.clear()
            self._outputs.clear()
            self._ready.set()
            self._cancel(self.request.request_id)

    @property
    def is_open(self) -> bool:
        """A choice has not ended yet."""
        return bool(self._open)

    # -- the engine's side ---------------------------------------------------------

    def note_begin(self, now: float) -> float | None:
        """A sequence has its first token; gives the seconds since arrival if no other has."""
        if self.stats.first_token_seconds:
            return None
        self.stats.first_token_seconds = now - self.request.arrival
        return self.stats.first_token_seconds

    def push_token(self, sample_index: int, token: int) -> None:
        """Add a token to a choice."""
        output = self._outputs.get(sample_index)
        if output is not None:
            output.tokens.append(token)
        elif sample_index in self._open:
            self._outputs[sample_index] = SequenceOutput(sample_index, [token])
            if not self._ready.is_set():
                self._ready.set()

    def push_logprobs(
        self,
        sample_index: int,
        sampled: PositionLogprobs | None,
        prompt: tuple[PositionLogprobs, ...],
    ) -> None:
        """Add log-probabilities, before the token they belong to."""
        if sample_index not in self._open:
            return
        output = self._outputs.setdefault(sample_index, SequenceOutput(sample_index, []))
        if prompt:
            output.prompt_logprobs = [*(output.prompt_logprobs or ()), *prompt]
        if sampled is not None:
            output.logprobs = [*(output.logprobs or ()), sampled]
        self._ready.set()

    def push_finish(
        self,
        sample_index: int,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        cumulative_logprob: float | None = None,
        error: str = "",
    ) -> None:
        """End a choice; later pushes for it are dropped."""
        if sample_index not in self._open:
            return
        output = self._outputs.setdefault(sample_index, SequenceOutput(sample_index, []))
        output.finish = reason
        output.stop_token_id = stop_token_id
        output.cumulative_logprob = cumulative_logprob
        output.error = error
        self._open.discard(sample_index)
        self._ready.set()

    def finish_all(self, reason: FinishReason, error: str = "") -> None:
        """End every choice that is still open."""
        for sample_index in sorted(self._open):
            self.push_finish(sample_index, reason, error=error)

    def fail(self, error: OctavoError) -> None:
        """Lose the request: the reader gets the error after what is already there."""
        self._error = error
        self._open.clear()
        self._ready.set()
