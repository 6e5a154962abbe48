"""Sending a workload: each request at its time, or as soon as there is room."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo_client.bench.measure import Record
from octavo_client.bench.targets import Target
from octavo_client.bench.workload import Request
from octavo_client.errors import OctavoError


@dataclass(frozen=True, slots=True)
class Run:
    """What a run gave."""

    records: list[Record]
    max_send_lag: float


async def run_workload(
    target: Target,
    requests: Sequence[Request],
    *,
    num_choices: int = 1,
    concurrency: int | None = None,
    on_end: Callable[[Record], None] = lambda _: None,
) -> Run:
    """Send every request at its arrival time; return what came back, in the same order.

    Args:
        target: the server, entered.
        requests: what to send.
        num_choices: choices that come back for each.
        concurrency: most requests at the server at once; None: no bound, which is the
            only way to load a server beyond what it can take.
        on_end: called as each request ends.
    """
    room = asyncio.Semaphore(concurrency) if concurrency is not None else None
    begin = time.perf_counter()
    lags = [0.0]

    def clock() -> float:
        return time.perf_counter() - begin

    async def send(record: Record) -> None:
        if room is not None:
            await room.acquire()
        try:
            await target.send(record, clock)
        except OctavoError as error:
            record.error = " ".join(f"{type(error).__name__}: {error}".split())
        finally:
            record.ended_at = clock()
            if room is not None:
                room.release()
        on_end(record)

    records = [Record(request, num_choices=num_choices) for request in requests]
    async with asyncio.TaskGroup() as group:
        for record in sorted(records, key=lambda each: each.request.arrival_seconds):
            due = record.request.arrival_seconds
            if due > clock():
                await asyncio.sleep(due - clock())
            lags.append(clock() - due)
            record.sent_at = clock()
            group.create_task(send(record))
    return Run(records, max(lags))
