"""What must hold at rest: every block free, every executor owned, no process grown."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from octavo_client import Executor

from tests.chaos.stack import Stack

RSS_SLACK_BYTES = 48 << 20
"""Caches of allocators and of the interpreter that fill with the first requests."""
FDS_SLACK = 10
"""Connections that were given up and are not closed yet, and those kept alive by clients."""
MOVED = "requests_moved"
_POLL_SECONDS = 0.2
_BAD_EVENTS = ("kv_check", "Traceback (most recent call last)")


@dataclass(frozen=True)
class Footprint:
    """One process at rest.

    Attributes:
        incarnation: of its service.
        rss_bytes: resident memory.
        num_fds: open files.
    """

    incarnation: int
    rss_bytes: int
    num_fds: int


def footprints(stack: Stack) -> dict[str, Footprint]:
    """Measure every process, by the service's name."""
    return {
        service.name: Footprint(service.incarnation, *service.resources())
        for service in stack.services
    }


def growth_problems(before: dict[str, Footprint], after: dict[str, Footprint]) -> list[str]:
    """Name the processes that lived through both measurements and grew beyond the slack."""
    problems = []
    for name, old in before.items():
        new = after[name]
        if new.incarnation != old.incarnation:
            problems.append(f"{name} was restarted between the two measurements")
            continue
        if new.rss_bytes - old.rss_bytes > RSS_SLACK_BYTES:
            sizes = f"{old.rss_bytes >> 20} to {new.rss_bytes >> 20} MiB"
            problems.append(f"{name} grew from {sizes}")
        if new.num_fds - old.num_fds > FDS_SLACK:
            problems.append(f"{name} went from {old.num_fds} to {new.num_fds} open files")
    return problems


def not_at_rest(held: Iterable[Executor], num_executors: int) -> str | None:
    """Say what keeps executors from being owned once each, with every block free."""
    executors = list(held)
    if len(executors) != num_executors:
        return f"{len(executors)} executors are held, of {num_executors}"
    for executor in executors:
        pool = executor.pool
        is_free = pool.num_free + pool.num_cached == pool.num_total
        is_host_free = pool.num_host_free == pool.num_host_total
        counts = (
            executor.num_queued,
            executor.num_running,
            executor.num_preempted,
            executor.num_draining_rows,
            pool.num_referenced,
            pool.num_fenced,
        )
        if any(counts) or not is_free or not is_host_free:
            return f"{executor.address} is not at rest: {executor}"
    return None


async def until_at_rest(stack: Stack, seconds: float) -> str | None:
    """Wait for rest; what is wrong if it does not come, else None."""
    give_up = time.monotonic() + seconds
    while True:
        held = (await stack.held()).values()
        why = not_at_rest((each for some in held for each in some), len(stack.executors))
        if why is None or time.monotonic() > give_up:
            return why
        await asyncio.sleep(_POLL_SECONDS)


def read_events(logs: Iterable[Path]) -> tuple[Counter[str], list[str]]:
    """Count the events in logs, and give the lines that no log should have.

    A move of several requests counts for each of them.
    """
    events: Counter[str] = Counter()
    bad = []
    for log in logs:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if any(word in line for word in _BAD_EVENTS) and '"kv_check": true' not in line:
                bad.append(f"{log.name}: {line[:300]}")
            if line.startswith("{"):
                try:
                    event = json.loads(line)
                except ValueError:  # cut off by a kill
                    continue
                is_move = event["event"] == MOVED
                events[event["event"]] += event["num_requests"] if is_move else 1
    return events, bad
