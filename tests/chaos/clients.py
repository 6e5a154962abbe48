"""Clients that ask, and compare every answer with the undisturbed one."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass

import httpx
from octavo_client import AsyncClient, Completion, Delta, RetryPolicy
from octavo_client._protocol import CompletionBuilder
from octavo_client.errors import OctavoError

from tests.chaos.catalogue import Entry, HttpEntry, difference
from tests.chaos.ledger import Ledger, StreamRecord

PATIENT = RetryPolicy(max_attempts=100_000, resume_seconds=600.0, max_backoff_seconds=1.0)
_STREAM_SECONDS = 600.0
_HTTP_SECONDS = 60.0
_HTTP_BACKOFF_SECONDS = 0.3


@dataclass
class Crowd:
    """What all clients share.

    Attributes:
        ledger: what they see goes there.
        seed: of the run.
        may_ask: set while new requests are to be made.
        is_over: no client asks again.
        busy: clients in the middle of a request.
    """

    ledger: Ledger
    seed: int

    def __post_init__(self) -> None:
        self.may_ask = asyncio.Event()
        self.may_ask.set()
        self.is_over = False
        self.busy: set[str] = set()

    async def wait_turn(self, name: str) -> bool:
        """Wait until a request may be made; False: there will be none."""
        self.busy.discard(name)
        await self.may_ask.wait()
        if self.is_over:
            return False
        self.busy.add(name)
        return True

    async def rest(self, seconds: float) -> None:
        """Let nobody ask again, and wait until every stream has ended.

        Raises: TimeoutError: naming the requests that have not.
        """
        self.may_ask.clear()
        give_up = time.monotonic() + seconds
        while self.busy:
            if time.monotonic() > give_up:
                live = {record.request_id: record.kind for record in self.ledger.live.values()}
                raise TimeoutError(f"unfinished after {seconds:g} s: {live or self.busy}")
            await asyncio.sleep(0.05)

    def end(self) -> None:
        """Send everybody home."""
        self.is_over = True
        self.may_ask.set()


async def use_sdk(
    crowd: Crowd,
    name: str,
    target: str,
    entries: list[Entry],
    policy: RetryPolicy = PATIENT,
) -> None:
    """Ask for entries at random until the crowd goes home."""
    rng = random.Random(f"{crowd.seed}/{name}")
    ledger = crowd.ledger
    current: list[StreamRecord] = []

    def note_outage(error: OctavoError) -> None:
        ledger.outages[type(error).__name__] += 1
        current[-1].num_outages += 1

    async with AsyncClient(target, retry=policy, on_retry=note_outage) as client:
        number = 0
        while await crowd.wait_turn(name):
            number += 1
            entry = rng.choice(entries)
            record = ledger.open(f"{name}-{number}", entry.kind)
            current[:] = [record]
            try:
                found = await follow(client, entry, record, ledger, priority=rng.choice((0, 0, 5)))
            except Exception as error:  # whatever it is, this stream is lost
                ledger.live.pop(record.request_id, None)
                ledger.note_problem(
                    f"stream {record.request_id} ({entry.kind}) was lost: "
                    f"{type(error).__name__}: {error}"
                )
                continue
            if (why := difference(entry, found)) is not None:
                ledger.note_problem(f"stream {record.request_id} ({entry.kind}) differs: {why}")
            ledger.close(record, flows=not entry.comes_at_once)


async def follow(
    client: AsyncClient, entry: Entry, record: StreamRecord, ledger: Ledger, *, priority: int = 0
) -> Completion:
    """Read one stream to its end.

    Raises: OctavoError: if it does not end well.
    """
    builder = CompletionBuilder()
    stream = client.stream(
        tokens=entry.tokens,
        timeout=_STREAM_SECONDS,
        request_id=record.request_id,
        priority=priority,
        **entry.params,
    )
    async with stream as events:
        async for event in events:
            builder.add(event)
            is_new = isinstance(event, Delta) and not event.is_prompt
            # `is_new` says that it is a delta, which mypy does not follow.
            num_tokens = len(event.token_ids) if is_new else 0  # type: ignore[union-attr]  # see above
            ledger.note_event(record, num_tokens)
    return builder.build()


async def use_http(crowd: Crowd, name: str, url: str, entries: list[HttpEntry]) -> None:
    """Ask the gateway; an answer that breaks off is asked for again, a whole one must be right."""
    rng = random.Random(f"{crowd.seed}/{name}")
    counts = crowd.ledger.num_http
    async with httpx.AsyncClient(base_url=url, timeout=_HTTP_SECONDS, trust_env=False) as http:
        while await crowd.wait_turn(name):
            entry = rng.choice(entries)
            try:
                text, end = await _ask_http(http, entry)
            except httpx.HTTPError:
                counts["broken off"] += 1
                await asyncio.sleep(_HTTP_BACKOFF_SECONDS)
                continue
            counts[end] += 1
            if end != "whole":
                await asyncio.sleep(_HTTP_BACKOFF_SECONDS)
            elif text != entry.text:
                crowd.ledger.note_problem(
                    f"HTTP client {name}: the text is {text!r} instead of {entry.text!r}"
                )


async def _ask_http(http: httpx.AsyncClient, entry: HttpEntry) -> tuple[str, str]:
    """Ask once.

    Returns: the text, and how it ended: "whole", "refused 503" or "broken off".
    """
    async with http.stream("POST", "/v1/completions", json=entry.body) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            return "", f"refused {response.status_code}"
        if not entry.body["stream"]:
            await response.aread()
            return response.json()["choices"][0]["text"], "whole"
        text = ""
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return text, "whole"
            if line.startswith("data: "):
                message = json.loads(line.removeprefix("data: "))
                if "error" in message:
                    return text, "broken off"
                text += "".join(choice["text"] for choice in message["choices"])
        return text, "broken off"
