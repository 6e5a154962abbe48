"""Where a request's time went, from the events of its story. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from octavo_client._state import EventKind, RequestEvent


class Phase(StrEnum):
    """What a request did, or waited for, between two of its events.

    BLOCKED is the part of the wait at the head of the queue, in which it was the next to be
    admitted and there was no room for it. PREFILL ends with the first token. What a request
    computes again after a preemption counts as the phase that it was in.
    """

    QUEUED = "queued"
    BLOCKED = "blocked"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    MOVED = "moved"


@dataclass(frozen=True, slots=True)
class Span:
    """A phase, from one event to another."""

    phase: Phase
    begin_unix_ns: int
    end_unix_ns: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_unix_ns - self.begin_unix_ns) / 1e9


_STARTS = {
    EventKind.ADMITTED: Phase.PREFILL,
    EventKind.FIRST_TOKEN: Phase.DECODE,
    EventKind.PREEMPTED_RECOMPUTE: Phase.PREEMPTED,
    EventKind.PREEMPTED_SWAP: Phase.PREEMPTED,
    EventKind.EXECUTOR_LOST: Phase.MOVED,
}
_GOES_ON = (EventKind.SWAPPED_IN, EventKind.RESUMED)
_WAITS = (Phase.QUEUED, Phase.BLOCKED)


def has_ended(events: Sequence[RequestEvent]) -> bool:
    """Whether the last thing that happened is an end; of one of several choices, it may be."""
    return bool(events) and events[-1].kind is EventKind.FINISHED


def spans_of(events: Sequence[RequestEvent], now_unix_ns: int) -> tuple[Span, ...]:
    """Give the phases in order; together they last from the first event to the end, or to now.

    Args:
        events: in order of time.
        now_unix_ns: where the last phase of a live request ends.
    """
    spans: list[Span] = []
    phase, was_admitted, has_token = Phase.QUEUED, False, False
    ends = [event.time_unix_ns for event in events[1:]]
    if events:
        last = events[-1].time_unix_ns
        ends.append(last if has_ended(events) else max(now_unix_ns, last))
    for event, end in zip(events, ends, strict=True):
        was_admitted |= event.kind is EventKind.ADMITTED
        has_token |= event.kind is EventKind.FIRST_TOKEN
        phase = _next(phase, event.kind, was_admitted=was_admitted, has_token=has_token)
        if spans and spans[-1].phase is phase:
            spans[-1] = Span(phase, spans[-1].begin_unix_ns, end)
        else:
            spans.append(Span(phase, event.time_unix_ns, end))
    return tuple(span for span in spans if span.end_unix_ns > span.begin_unix_ns)


def _next(phase: Phase, kind: EventKind, *, was_admitted: bool, has_token: bool) -> Phase:
    if kind in _STARTS:
        return _STARTS[kind]
    if kind in _GOES_ON:
        return Phase.DECODE if has_token else Phase.PREFILL
    if kind is EventKind.MOVED and not was_admitted:  # it waits as before, in another queue
        return Phase.QUEUED
    if kind is EventKind.BLOCKED and phase in _WAITS:
        return Phase.BLOCKED
    return phase


def seconds_by_phase(spans: Sequence[Span]) -> dict[Phase, float]:
    """Sum up; phases that there were none of are 0."""
    sums = dict.fromkeys(Phase, 0.0)
    for span in spans:
        sums[span.phase] += span.seconds
    return sums
