"""Answers of POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from octavo_client import Choice, Completion, Delta, Finished, PositionLogprobs

from octavo_gateway import logprobs
from octavo_gateway.generation import Payload
from octavo_gateway.served import Served
from octavo_gateway.tokens import Offsets
from octavo_gateway.translate import Job


class CompletionRenderer:
    """Writes one answer: whole, or as chunks that all have its id and time.

    The choices of the second prompt follow those of the first, and so on.
    """

    def __init__(self, job: Job, served: Served) -> None:
        self._job = job
        self._look_up = served.vocabulary.__getitem__
        self._offsets: dict[int, Offsets] = {}
        self._with_prompt: set[int] = set()  # choices whose prompt has begun
        self.answer_id = f"cmpl-{secrets.token_hex(16)}"
        self._common = {
            "id": self.answer_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.model.model,
            "system_fingerprint": served.fingerprint,
        }

    def started(self, call: int) -> Iterator[Payload]:  # noqa: ARG002  # the protocol's
        """Give nothing: text comes first."""
        yield from ()

    def delta(self, call: int, delta: Delta) -> Iterator[Payload]:
        """Pass on text, and the prompt where it is echoed."""
        job, index = self._job, self._index(call, delta.index)
        if delta.is_prompt and not job.echo and not job.return_token_ids:
            return
        if not delta.text and job.logprobs is None and not job.return_token_ids:
            return  # a character or a stop string is not complete yet
        text = delta.text if job.echo or not delta.is_prompt else ""
        extra: dict[str, Any] = {}
        if job.logprobs is not None and (job.echo or not delta.is_prompt):
            positions: Sequence[PositionLogprobs | None] = delta.logprobs
            if delta.is_prompt:
                positions = self._prompt_positions(index, delta)
            extra["logprobs"] = self._logprobs(index, delta.token_ids, positions)
        if job.return_token_ids:
            name = "prompt_token_ids" if delta.is_prompt else "token_ids"
            extra[name] = list(delta.token_ids)
        yield self._chunk(index, text, **extra)

    def finished(self, call: int, finished: Finished) -> Iterator[Payload]:
        """End one choice."""
        index = self._index(call, finished.index)
        yield self._chunk(
            index, "", finish_reason=str(finished.reason), stop_reason=finished.stopped_by
        )

    def usage(self, usage: Payload) -> Payload:
        """Give the chunk after all choices have ended."""
        return {**self._common, "choices": [], "usage": usage}

    def whole(self, completions: Sequence[Completion], usage: Payload) -> Payload:
        """Give the whole answer."""
        choices = [
            self._choice(self._index(call, choice.index), choice)
            for call, completion in enumerate(completions)
            for choice in completion.choices
        ]
        return {**self._common, "choices": choices, "usage": usage}

    def _choice(self, index: int, choice: Choice) -> Payload:
        job = self._job
        token_ids: Sequence[int] = choice.token_ids
        positions: Sequence[PositionLogprobs | None] = choice.logprobs
        of_prompt: Sequence[PositionLogprobs | None] = ()
        if choice.prompt_logprobs:
            of_prompt = logprobs.prompt_positions(choice.prompt_token_ids, choice.prompt_logprobs)
        text = choice.text
        if job.echo:
            text = choice.prompt_text + text
            token_ids = (*choice.prompt_token_ids, *token_ids)
            positions = (*of_prompt, *positions)
        payload: Payload = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": str(choice.finish_reason),
            "stop_reason": choice.stopped_by,
        }
        if job.logprobs is not None:
            payload["logprobs"] = self._logprobs(index, token_ids, positions)
        if job.prompt_logprobs is not None:
            payload["prompt_logprobs"] = logprobs.prompt_logprobs(
                of_prompt, job.prompt_logprobs, self._look_up
            )
        if job.return_token_ids:
            payload["prompt_token_ids"] = list(choice.prompt_token_ids)
            payload["token_ids"] = list(choice.token_ids)
        return payload

    def _index(self, call: int, index: int) -> int:
        return call * self._job.n + index

    def _logprobs(
        self,
        index: int,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs | None],
    ) -> Payload:
        if index not in self._offsets:
            self._offsets[index] = Offsets(keeps_special=self._job.keeps_special)
        assert self._job.logprobs is not None
        return logprobs.completion_object(
            token_ids, positions, self._job.logprobs, self._offsets[index], self._look_up
        )

    def _prompt_positions(self, index: int, delta: Delta) -> Sequence[PositionLogprobs | None]:
        """Mark what has no log-probability: a long prompt comes in several deltas."""
        is_first = index not in self._with_prompt
        self._with_prompt.add(index)
        return logprobs.prompt_positions(delta.token_ids, delta.logprobs, is_first=is_first)

    def _chunk(
        self, index: int, text: str, *, finish_reason: str | None = None, **extra: Any
    ) -> Payload:
        choice = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            **extra,
        }
        chunk: Payload = {**self._common, "choices": [choice]}
        if self._job.include_usage:
            chunk["usage"] = None
        return chunk
