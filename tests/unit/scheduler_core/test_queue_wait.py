"""Requests that would wait too long are refused at once, with the time to come back."""

from __future__ import annotations

import pytest

from scheduler_svc.core.queue_wait import QueueWait
from scheduler_svc.errors import QueueFull
from tests.support.core_builders import finish, make_harness, make_request
from tests.support.core_harness import CoreHarness


def test_the_estimate_follows_the_admissions() -> None:
    """And grows while nobody is admitted; time without a queue counts nothing."""
    wait = QueueWait()
    assert wait.estimate(0, 0.0, ()) == 0.0
    assert wait.estimate(5, 0.0, ()) is None
    wait.note_arrival(100.0, 0)
    for second in range(1, 11):
        wait.note_arrival(100.0 + second, 3)
        wait.note_admission(100.0 + second)
    assert wait.estimate(9, 110.0, ()) == 10.0
    assert wait.estimate(9, 120.0, ()) == 20.0
    wait.note_arrival(5000.0, 0)
    assert wait.estimate(9, 5000.0, ()) == 10.0


def test_who_was_admitted_together_ends_together() -> None:
    """However short the queue: there is no place before, and then there are many."""
    wait = QueueWait()
    for _ in range(8):
        wait.note_end(6.0)
    begun = [100.0] * 4
    assert wait.estimate(0, 101.0, begun) == 5.0
    assert wait.estimate(3, 101.0, begun) == 5.0
    assert wait.estimate(4, 101.0, begun) == 11.0, "a round later"
    assert wait.estimate(0, 105.5, begun) == 0.5
    assert wait.estimate(0, 200.0, begun) == 0.0, "they are late, and may end at any moment"
    assert wait.estimate(1, 101.0, [100.0, 98.0]) == 5.0
    assert wait.estimate(0, 101.0, [100.0, 98.0]) == 3.0


def test_a_place_that_is_free_is_given_at_once() -> None:
    """And what comes while all are taken is refused, though nobody waits."""
    harness = make_harness(max_num_seqs=2, max_num_batched_tokens=16, max_queue_seconds=2.0)
    for index in range(8):  # ten steps each, a second a step
        harness.add(make_request(f"warm{index}", 4, max_tokens=10, arrival=harness.now))
        while harness.core.has_requests:
            harness.step()
            harness.advance(1.0)
    first = make_request("first", 4, max_tokens=10, arrival=harness.now)
    assert harness.add(first)
    harness.step()
    harness.core.check_room(harness.now, 0)
    assert harness.add(make_request("second", 4, max_tokens=10, arrival=harness.now))
    harness.step()
    with pytest.raises(QueueFull, match="takes about"):
        harness.core.check_room(harness.now, 0)
    assert not harness.add(make_request("third", 4, max_tokens=10, arrival=harness.now))
    for _ in range(8):
        harness.advance(1.0)
        harness.step()
    assert harness.add(make_request("fourth", 4, max_tokens=10, arrival=harness.now))
    finish(harness)


def _used(**changes: object) -> CoreHarness:
    """A core whose last requests ran for ten seconds each, and which is idle."""
    harness = make_harness(max_num_batched_tokens=16, max_queue_seconds=2.0, **changes)
    for index in range(8):
        harness.add(make_request(f"warm{index}", 4, max_tokens=10, arrival=harness.now))
        while harness.core.has_requests:
            harness.step()
            harness.advance(1.0)
    return harness


def test_a_burst_is_taken_as_far_as_there_are_places() -> None:
    """Those that wait for the next step only wait for no one."""
    harness = _used(max_num_seqs=4)
    harness.add(make_request("long", 4, max_tokens=10, arrival=harness.now))
    harness.step()
    harness.advance(1.0)
    taken = [
        harness.add(make_request(f"b{i}", 4, max_tokens=2, arrival=harness.now)) for i in range(5)
    ]
    assert taken == [True, True, True, False, False]
    finish(harness)


def test_a_burst_is_taken_as_far_as_there_are_blocks() -> None:
    """A place is blocks as well as a row."""
    harness = _used(max_num_seqs=8, num_blocks=8, prefix_cache=False)
    harness.add(make_request("long", 12, max_tokens=8, arrival=harness.now))
    harness.step()
    taken = [
        harness.add(make_request(f"b{i}", 8, max_tokens=2, arrival=harness.now)) for i in range(4)
    ]
    assert taken == [True, True, False, False], "3 of 8 blocks are taken, and each needs 2"
    finish(harness)


def test_who_takes_the_place_of_a_lower_priority_waits_for_no_one() -> None:
    """Nor does who stands before all that wait count them."""
    harness = _used(max_num_seqs=2)
    for index in range(2):
        harness.add(make_request(f"low{index}", 4, max_tokens=10, arrival=harness.now))
    harness.step()
    assert not harness.add(make_request("also low", 4, max_tokens=2, arrival=harness.now))
    urgent = make_request("urgent", 4, max_tokens=2, priority=9, arrival=harness.now)
    harness.core.check_room(harness.now, 9)
    assert harness.add(urgent)
    harness.step()
    assert "urgent" in harness.admitted
    finish(harness)


def test_under_fcfs_priority_helps_nobody() -> None:
    """It does not when it comes to running, so it must not here."""
    harness = _used(max_num_seqs=1, policy="fcfs")
    harness.add(make_request("first", 4, max_tokens=10, arrival=harness.now))
    harness.step()
    assert not harness.add(make_request("urgent", 4, priority=9, arrival=harness.now))
    finish(harness)


def test_a_long_queue_is_refused_before_it_is_full() -> None:
    """With a delay near the wait; what waits already is untouched."""
    harness = make_harness(max_num_seqs=1, max_num_batched_tokens=16, max_queue_seconds=8.0)
    names = iter(f"r{index}" for index in range(100))

    def add() -> None:
        request = make_request(next(names), 4, max_tokens=1, arrival=harness.now)
        harness.core.add(request)
        harness.requests[request.request_id] = request

    for _ in range(3):
        add()
    for _ in range(10):  # one admission a second, and the queue is never empty
        harness.step()
        harness.advance(1.0)
        add()
    with pytest.raises(QueueFull, match="takes about") as refusal:
        while True:
            add()
    assert 7 <= len(harness.core.state.waiting) <= 9
    assert 8.0 <= refusal.value.retry_seconds <= 10.0
    finish(harness)


def test_an_idle_hour_says_nothing_about_the_queue() -> None:
    """A burst after it is taken: the pace is that of the present queue."""
    harness = make_harness(max_num_seqs=2, max_num_batched_tokens=16, max_queue_seconds=5.0)
    for index in range(10):
        harness.add(make_request(f"warm{index}", 4, max_tokens=1, arrival=harness.now))
        harness.step()
        harness.advance(0.1)
    harness.advance(3600.0)
    burst = [make_request(f"r{i}", 4, max_tokens=2, arrival=harness.now) for i in range(6)]
    assert all(harness.add(request) for request in burst)
    finish(harness)


def test_without_a_bound_only_the_length_counts() -> None:
    """Whatever the wait."""
    harness = make_harness(max_num_seqs=2, max_num_batched_tokens=16, max_queue=5)
    results = [harness.add(make_request(f"r{i}", 4, arrival=100.0)) for i in range(7)]
    assert results == [True] * 5 + [False] * 2
    finish(harness)
