"""Clients that read a stream in the background while a test disturbs who serves it."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
from octavo_client import Client, Delta, Finished

MODEL = "smollm2-135m-instruct"
_SECONDS = 180.0


class Stream(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, read: Callable[[], Iterator[int]]) -> None:
        """Begin; `read` yields at every piece how many tokens are known to have come."""
        super().__init__(daemon=True)
        self._read = read
        self._has_begun = threading.Event()
        self._num_tokens = 0
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        """The thread."""
        try:
            for num_tokens in self._read():
                self._num_tokens = num_tokens
                self._has_begun.set()
        except Exception as error:
            self._error = error
        self._has_begun.set()

    def until_begun(self) -> None:
        """Wait for the first piece.

        Raises:  AssertionError: if the stream has ended by then.
        """
        assert self._has_begun.wait(_SECONDS), "no first piece came"
        assert self.is_alive(), f"it ended at once: {self._error}"

    def num_tokens(self) -> int:
        """Wait for the end; gives how many tokens came.

        Raises:  Exception: what ended it, if that was not its own end.
        """
        self.join(_SECONDS)
        assert not self.is_alive(), "the stream does not end"
        if self._error is not None:
            raise self._error
        return self._num_tokens


def openai_client(url: str, key: str = "", ca: Path | None = None) -> openai.OpenAI:
    """OpenAI's own client of a gateway; it does not try again what failed."""
    verify = ssl.create_default_context(cafile=ca) if ca else True
    http = httpx.Client(verify=verify, trust_env=False, timeout=_SECONDS)
    return openai.OpenAI(
        base_url=f"{url}/v1", api_key=key or "none", max_retries=0, http_client=http
    )


def over_http(ai: openai.OpenAI, prompt: str, num_tokens: int) -> Stream:
    """Stream so many tokens from the gateway."""

    def read() -> Iterator[int]:
        events = ai.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=num_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        reasons = []
        for event in events:
            reasons += [choice.finish_reason for choice in event.choices if choice.finish_reason]
            yield event.usage.completion_tokens if event.usage else 0
        assert reasons == ["length"]

    return Stream(read)


def over_grpc(client: Client, prompt: str, num_tokens: int) -> Stream:
    """Stream so many tokens from a scheduler."""

    def read() -> Iterator[int]:
        so_far, ends = 0, []
        with client.stream(prompt, max_tokens=num_tokens, ignore_eos=True) as stream:
            for event in stream:
                if isinstance(event, Delta):
                    so_far += len(event.token_ids)
                elif isinstance(event, Finished):
                    ends.append(event.num_tokens)
                if so_far:
                    yield so_far
        assert ends == [so_far]

    return Stream(read)
