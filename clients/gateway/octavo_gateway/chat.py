"""Answers of POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from octavo_client import Choice, Completion, Delta, Finished

from octavo_gateway import logprobs
from octavo_gateway.generation import Payload
from octavo_gateway.served import Served
from octavo_gateway.translate import Job


class ChatRenderer:
    """Writes one answer: whole, or as chunks that all have its id and time."""

    def __init__(self, job: Job, served: Served) -> None:
        self._job = job
        self._look_up = served.vocabulary.__getitem__
        self.answer_id = f"chatcmpl-{secrets.token_hex(16)}"
        self._common = {
            "id": self.answer_id,
            "created": int(time.time()),
            "model": served.model.model,
            "system_fingerprint": served.fingerprint,
        }

    def started(self, call: int) -> Iterator[Payload]:
        """Name the speaker of every choice before there is any text."""
        assert call == 0  # a chat has one prompt
        for index in range(self._job.n):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, call: int, delta: Delta) -> Iterator[Payload]:
        """Pass on text; the prompt's echo only serves to show its token ids."""
        assert call == 0
        job = self._job
        if delta.is_prompt:
            if job.return_token_ids and delta.index == 0:
                chunk = self._chunks([])
                chunk["prompt_token_ids"] = list(delta.token_ids)
                yield chunk
            return
        if not delta.text and job.logprobs is None and not job.return_token_ids:
            return  # a character or a stop string is not complete yet
        extra: dict[str, Any] = {}
        if job.logprobs is not None:
            entries = logprobs.chat_entries(delta.logprobs, self._look_up)
            extra["logprobs"] = {"content": entries, "refusal": None}
        if job.return_token_ids:
            extra["token_ids"] = list(delta.token_ids)
        yield self._chunk(delta.index, {"content": delta.text}, **extra)

    def finished(self, call: int, finished: Finished) -> Iterator[Payload]:
        """End one choice."""
        assert call == 0
        yield self._chunk(
            finished.index, {}, finish_reason=str(finished.reason), stop_reason=finished.stopped_by
        )

    def usage(self, usage: Payload) -> Payload:
        """Give the chunk after all choices have ended."""
        return {**self._chunks([]), "usage": usage}

    def whole(self, completions: Sequence[Completion], usage: Payload) -> Payload:
        """Give the whole answer."""
        (completion,) = completions
        payload: Payload = {
            **self._common,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in completion.choices],
            "usage": usage,
        }
        first = completion.choices[0]
        if self._job.return_token_ids:
            payload["prompt_token_ids"] = list(first.prompt_token_ids)
        if self._job.prompt_logprobs is not None:
            payload["prompt_logprobs"] = logprobs.prompt_logprobs(
                logprobs.prompt_positions(first.prompt_token_ids, first.prompt_logprobs),
                self._job.prompt_logprobs,
                self._look_up,
            )
        return payload

    def _choice(self, choice: Choice) -> Payload:
        shown = None
        if self._job.logprobs is not None:
            entries = logprobs.chat_entries(choice.logprobs, self._look_up)
            shown = {"content": entries, "refusal": None}
        payload: Payload = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": shown,
            "finish_reason": str(choice.finish_reason),
            "stop_reason": choice.stopped_by,
        }
        if self._job.return_token_ids:
            payload["token_ids"] = list(choice.token_ids)
        return payload

    def _chunk(
        self, index: int, delta: dict[str, str], *, finish_reason: str | None = None, **extra: Any
    ) -> Payload:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
            **extra,
        }
        return self._chunks([choice])

    def _chunks(self, choices: list[Payload]) -> Payload:
        chunk: Payload = {
            **self._common,
            "object": "chat.completion.chunk",
            "choices": choices,
        }
        if self._job.include_usage:
            chunk["usage"] = None
        return chunk
