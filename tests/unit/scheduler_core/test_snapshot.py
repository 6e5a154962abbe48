"""What operators see of the pool."""

from __future__ import annotations

from scheduler_svc.core import snapshot
from tests.support.core_builders import finish, make_harness, make_request


def _counts(harness) -> snapshot.PoolCounts:
    return snapshot.count_pool(harness.core.state)


def test_an_empty_pool_is_all_free() -> None:
    """Device and host."""
    counts = _counts(make_harness(num_blocks=10, num_host_blocks=3))
    assert (counts.num_total, counts.num_free, counts.num_referenced) == (10, 10, 0)
    assert (counts.num_host_total, counts.num_host_free) == (3, 3)
    assert counts.live_slots == counts.internal_waste_slots == 0


def test_slots_are_live_or_the_unfilled_end_of_a_block() -> None:
    """A block that several hold counts once, as full as the fullest has it."""
    harness = make_harness()
    harness.add(make_request("r", 6, best_of=3))
    harness.step()
    counts = _counts(harness)
    assert (counts.num_referenced, counts.num_shared) == (2, 2)
    assert (counts.live_slots, counts.internal_waste_slots) == (6, 2)
    harness.step()
    counts = _counts(harness)
    assert (counts.num_referenced, counts.num_shared) == (4, 1)
    assert (counts.live_slots, counts.internal_waste_slots) == (4 + 3 * 3, 3)
    finish(harness)


def test_every_block_has_the_kind_that_its_place_says() -> None:
    """Free, cached, referenced, fenced: as many of each as counted."""
    harness = make_harness(num_blocks=12, max_steps_in_flight=2)
    harness.add(make_request("old", 9, max_tokens=1))
    finish(harness)
    harness.add(make_request("stays", 6))
    harness.add(make_request("goes", 5))
    harness.plan()
    harness.cancel("goes")
    kinds = snapshot.block_kinds(harness.core.state)
    counts = _counts(harness)
    assert [kinds.count(kind) for kind in range(4)] == [6, 2, 2, 2]
    assert (counts.num_free, counts.num_cached, counts.num_fenced) == (6, 2, 2)
    assert counts.num_referenced == 4, "a fence is a reference"
    finish(harness)


def test_live_sequences_are_those_that_want_more_tokens() -> None:
    """Waiting, running and preempted ones, in order of arrival."""
    harness = make_harness(max_num_seqs=3)
    harness.add(make_request("a", 4, best_of=2))
    harness.add(make_request("b", 4, best_of=2, arrival=1.0))
    harness.step()
    names = [
        (seq.group.request.request_id, seq.sample_index)
        for seq in snapshot.live_sequences(harness.core.state)
    ]
    assert names == [("a", 0), ("a", 1), ("b", 0)]
    finish(harness)
