"""Requests that would wait too long are refused at once, with the time to come back."""

from __future__ import annotations

import pytest

from scheduler_svc.core.queue_wait import QueueWait
from scheduler_svc.errors import QueueFull
from tests.support.core_builders import finish, make_harness, make_request


def test_the_estimate_follows_the_admissions() -> None:
    """And grows while nobody is admitted."""
    wait = QueueWait()
    assert wait.estimate(0, 0.0) == 0.0
    assert wait.estimate(5, 0.0) is None
    for second in range(10):
        wait.note_admission(float(second))
    assert wait.estimate(9, 10.0) == 10.0
    assert wait.estimate(9, 20.0) == 20.0
    wait.forget()
    assert wait.estimate(9, 20.0) is None


def test_a_long_queue_is_refused_before_it_is_full() -> None:
    """With a delay near the wait; what waits already is untouched."""
    harness = make_harness(max_num_seqs=2, max_num_batched_tokens=16, max_queue_seconds=8.0)
    for index in range(10):  # one admission a second
        harness.add(make_request(f"warm{index}", 4, max_tokens=1, arrival=harness.now))
        harness.step()
        harness.advance(1.0)
    taken = 0
    with pytest.raises(QueueFull, match="takes about") as refusal:
        while True:
            request = make_request(f"r{taken}", 4, max_tokens=4, arrival=harness.now)
            harness.core.add(request)
            harness.requests[request.request_id] = request
            taken += 1
    assert 6 <= taken <= 10
    assert 8.0 <= refusal.value.retry_seconds <= 12.0
    finish(harness)


def test_without_a_bound_only_the_length_counts() -> None:
    """Whatever the wait."""
    harness = make_harness(max_num_seqs=2, max_num_batched_tokens=16, max_queue=5)
    results = [harness.add(make_request(f"r{i}", 4, arrival=100.0)) for i in range(7)]
    assert results == [True] * 5 + [False] * 2
    finish(harness)
