"""Tests of octavo_client._story: every nanosecond of a request belongs to one phase."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from octavo_client import EventKind, RequestEvent
from octavo_client._story import Phase, has_ended, seconds_by_phase, spans_of

K = EventKind


def events(*pairs: tuple[EventKind, float]) -> list[RequestEvent]:
    return [RequestEvent(kind, round(at * 1e9)) for kind, at in pairs]


def phases(*pairs: tuple[EventKind, float], now: float = 100) -> list[tuple[Phase, float]]:
    return [(span.phase, span.seconds) for span in spans_of(events(*pairs), round(now * 1e9))]


def test_a_plain_request() -> None:
    """It waits, computes its prompt, generates; its end is the end of the last phase."""
    assert phases((K.QUEUED, 1), (K.ADMITTED, 3), (K.FIRST_TOKEN, 4), (K.FINISHED, 9)) == [
        (Phase.QUEUED, 2),
        (Phase.PREFILL, 1),
        (Phase.DECODE, 5),
    ]


def test_the_head_of_the_queue_is_told_apart() -> None:
    """Behind others, then next without room: two reasons, two phases."""
    assert phases(
        (K.QUEUED, 0), (K.BLOCKED, 2), (K.BLOCKED, 3), (K.ADMITTED, 7), (K.FINISHED, 8)
    ) == [(Phase.QUEUED, 2), (Phase.BLOCKED, 5), (Phase.PREFILL, 1)]


def test_preemption_and_return() -> None:
    """By recompute or from the host, it goes on with what it did."""
    told = [(K.QUEUED, 0), (K.ADMITTED, 1), (K.PREEMPTED_RECOMPUTE, 2), (K.RESUMED, 5)]
    told += [(K.FIRST_TOKEN, 6), (K.PREEMPTED_SWAP, 8), (K.BLOCKED, 9), (K.SWAPPED_IN, 10)]
    assert phases(*told, (K.RESUMED, 10), (K.FINISHED, 12)) == [
        (Phase.QUEUED, 1),
        (Phase.PREFILL, 1),
        (Phase.PREEMPTED, 3),
        (Phase.PREFILL, 1),
        (Phase.DECODE, 2),
        (Phase.PREEMPTED, 2),
        (Phase.DECODE, 2),
    ]


def test_a_lost_executor_counts_as_moving_until_it_goes_on() -> None:
    """But who had only waited waits on, elsewhere."""
    told = [(K.QUEUED, 0), (K.ADMITTED, 1), (K.FIRST_TOKEN, 2)]
    told += [(K.EXECUTOR_LOST, 4), (K.MOVED, 5), (K.RESUMED, 7), (K.FINISHED, 8)]
    assert phases(*told)[-2:] == [(Phase.MOVED, 3), (Phase.DECODE, 1)]
    assert phases((K.QUEUED, 0), (K.MOVED, 2), (K.ADMITTED, 5), (K.FINISHED, 6)) == [
        (Phase.QUEUED, 5),
        (Phase.PREFILL, 1),
    ]


def test_a_live_request_lasts_until_now() -> None:
    """And one whose first choice ended, too, as soon as more happens."""
    assert phases((K.QUEUED, 0), (K.ADMITTED, 1), now=4)[-1] == (Phase.PREFILL, 3)
    told = [(K.QUEUED, 0), (K.ADMITTED, 1), (K.FIRST_TOKEN, 2), (K.FINISHED, 3)]
    assert phases(*told, (K.FINISHED, 6))[-1] == (Phase.DECODE, 4)
    assert has_ended(events(*told))
    assert not has_ended(events(*told[:-1]))


def test_what_happened_at_one_instant_took_no_time() -> None:
    """There is no span without length, and no events give none."""
    assert phases((K.QUEUED, 0), (K.ADMITTED, 0), (K.FINISHED, 2)) == [(Phase.PREFILL, 2)]
    assert phases() == []


@given(
    kinds=st.lists(st.sampled_from(list(EventKind)), min_size=1, max_size=30),
    gaps=st.lists(st.integers(0, 10**12), min_size=31, max_size=31),
)
def test_phases_add_up(kinds: list[EventKind], gaps: list[int]) -> None:
    """Whatever happens, in whatever order: they follow each other without a hole."""
    times = [sum(gaps[: number + 1]) for number in range(len(kinds))]
    story = [RequestEvent(kind, at) for kind, at in zip(kinds, times, strict=True)]
    now = times[-1] + gaps[-1]
    spans = spans_of(story, now)
    end = times[-1] if has_ended(story) else now
    assert sum(span.end_unix_ns - span.begin_unix_ns for span in spans) == end - times[0]
    for before, after in itertools.pairwise(spans):
        assert before.end_unix_ns == after.begin_unix_ns
    assert set(seconds_by_phase(spans)) == set(Phase)
