"""What a run saw: streams, tokens, pauses, faults, and everything that is off."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

_IN_FLIGHT_SECONDS = 0.3
"""Tokens may arrive for so long after their executor has died: they were on their way."""


@dataclass(eq=False)
class StreamRecord:
    """The course of one stream.

    Attributes:
        request_id: as the client chose it.
        kind: of the request.
        begin: monotonic time, seconds.
        times: of every event.
        deaths: when an executor died that it was on, and whether another one was up.
        num_outages: how often its call broke.
    """

    request_id: str
    kind: str
    begin: float
    times: list[float] = field(default_factory=list)
    deaths: list[tuple[float, bool]] = field(default_factory=list)
    num_outages: int = 0

    @property
    def longest_pause(self) -> float:
        """Seconds between two events, or before the first one."""
        moments = [self.begin, *self.times]
        return max((b - a for a, b in pairwise(moments)), default=0.0)

    def pause_after(self, death: float) -> float | None:
        """The pause that a death made, seconds; None: nothing came after it."""
        moments = [self.begin, *self.times]
        pauses = [
            b - a for a, b in pairwise(moments) if b > death and a <= death + _IN_FLIGHT_SECONDS
        ]
        return max(pauses, default=None)


@dataclass
class Ledger:
    """Sums over all streams and faults.

    Attributes:
        begin: monotonic time of the run's begin, seconds.
        live: streams that are open.
        num_streams: that ended well, by kind.
        num_http: of HTTP requests, by how they ended.
        tokens_by_second: that arrived, by whole second since the begin.
        outages: how often a stream's call broke, by what the SDK said of it.
        pauses: longest of each stream.
        recoveries: pauses of streams whose executor died, by whether another one was up.
        faults: (second, kind, target) as they were injected.
        problems: what must not be, one line each.
    """

    begin: float = field(default_factory=time.monotonic)
    live: dict[str, StreamRecord] = field(default_factory=dict)
    num_streams: Counter[str] = field(default_factory=Counter)
    num_http: Counter[str] = field(default_factory=Counter)
    tokens_by_second: Counter[int] = field(default_factory=Counter)
    outages: Counter[str] = field(default_factory=Counter)
    num_resumed_streams: int = 0
    pauses: list[float] = field(default_factory=list)
    recoveries: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    faults: list[tuple[float, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """That clients received."""
        return self.tokens_by_second.total()

    @property
    def seconds(self) -> float:
        """Since the begin."""
        return time.monotonic() - self.begin

    def open(self, request_id: str, kind: str) -> StreamRecord:
        """A stream begins."""
        record = StreamRecord(request_id, kind, time.monotonic())
        self.live[request_id] = record
        return record

    def note_event(self, record: StreamRecord, num_tokens: int) -> None:
        """An event of a stream arrived."""
        now = time.monotonic()
        record.times.append(now)
        self.tokens_by_second[int(now - self.begin)] += num_tokens

    def close(self, record: StreamRecord, *, flows: bool) -> None:
        """A stream ended as it should.

        Args:
            record: its own.
            flows: whether its tokens come as they are made, so that a pause says something.
        """
        self.live.pop(record.request_id, None)
        self.num_streams[record.kind] += 1
        self.num_resumed_streams += bool(record.num_outages)
        if flows:
            self.pauses.append(record.longest_pause)
            for death, is_another_up in record.deaths:
                if (pause := record.pause_after(death)) is not None:
                    self.recoveries[is_another_up].append(pause)

    def note_death(self, request_ids: set[str], is_another_up: bool) -> None:
        """An executor is about to die under these requests; another one is up, or none."""
        now = time.monotonic()
        for request_id in request_ids:
            # A resumed call has a suffix of the SDK's.
            record = self.live.get(request_id.partition(".r")[0])
            if record is not None:
                record.deaths.append((now, is_another_up))

    def note_fault(self, kind: str, target: str) -> None:
        """A fault is injected now."""
        self.faults.append((round(self.seconds, 2), kind, target))

    def note_problem(self, problem: str) -> None:
        """Something is off; when it was is added."""
        self.problems.append(f"{self.seconds:.1f} s: {problem}")


def quantile(values: list[float], share: float) -> float:
    """The value below which that share lies; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
