"""Who gives way, how, and that nobody notices."""

from __future__ import annotations

import pytest

from scheduler_svc.core.request import BeamParams
from scheduler_svc.core.sequence import GroupStatus
from tests.support.core_builders import finish, make_harness, make_request, step_until

_BOTH = pytest.mark.parametrize("preemption", ["recompute", "swap"])


def _crowded(preemption: str, **changes: object):
    """A harness whose pool holds about half of what its requests need at their longest."""
    return make_harness(
        **{
            "num_blocks": 12,
            "num_host_blocks": 40,
            "preemption": preemption,
            "max_steps_in_flight": 2,
            "prefix_cache": False,
            **changes,
        }
    )


def _num_preemptions(harness) -> tuple[int, int]:
    counters = harness.core.state.counters
    return counters.num_recompute_preemptions, counters.num_swap_preemptions


@_BOTH
def test_the_newest_gives_way_to_the_oldest(preemption: str) -> None:
    """Victims go from the back of the line, and come back in their order."""
    harness = _crowded(preemption, num_blocks=9)
    for name, arrival in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
        harness.add(make_request(name, 8, max_tokens=16, arrival=arrival))
    step_until(harness, lambda: harness.core.state.preempted)
    assert [g.request.request_id for g in harness.core.state.preempted] == ["c"]
    finish(harness)
    assert harness.core.state.counters.num_finished == 3


@_BOTH
def test_samples_have_the_same_tokens_with_preemption_as_without(preemption: str) -> None:
    """In mid-generation, for every sample, whichever way its blocks went."""
    harness = _crowded(preemption, num_blocks=10)
    for index in range(4):
        harness.add(make_request(f"r{index}", 7, best_of=2, max_tokens=10, arrival=float(index)))
    finish(harness)
    assert _num_preemptions(harness)[preemption == "swap"] > 0


@_BOTH
def test_a_search_has_the_same_result_with_preemption_as_without(preemption: str) -> None:
    """Beams are given up or moved between steps, never in the middle of a choice."""
    harness = _crowded(preemption)
    harness.add(make_request("a", 6, max_tokens=20))
    for index in range(3):
        beam = BeamParams(3)
        harness.add(
            make_request(f"s{index}", 6, best_of=3, beam=beam, max_tokens=8, arrival=index + 1.0)
        )
    finish(harness)
    assert sum(_num_preemptions(harness)) > 0


@_BOTH
def test_a_request_draws_the_same_tokens_alone_and_in_a_crowd(preemption: str) -> None:
    """What runs beside it, and how often it is pushed out, cannot change its draw."""
    alone = make_harness()
    alone.add(make_request("r", 7, best_of=2, max_tokens=12, arrival=9.0))
    finish(alone)
    crowd = _crowded(preemption, num_blocks=10)
    for index in range(3):
        crowd.add(make_request(f"other{index}", 5, max_tokens=15, arrival=float(index)))
    crowd.add(make_request("r", 7, best_of=2, max_tokens=12, arrival=9.0))
    finish(crowd)
    assert sum(_num_preemptions(crowd)) > 0
    assert all(crowd.tokens["r", index] == alone.tokens["r", index] for index in range(2))


def test_a_swapped_request_reads_its_own_content_when_it_is_back() -> None:
    """Under load, with the host pool nearly full, over many rounds."""
    harness = _crowded("swap", num_blocks=10, num_host_blocks=9)
    for index in range(8):
        harness.add(make_request(f"r{index}", 6, max_tokens=14, arrival=float(index)))
    finish(harness)
    assert _num_preemptions(harness)[1] >= 3


def test_all_samples_of_a_request_leave_together() -> None:
    """All or nothing: none of them holds a block while another is out."""
    harness = _crowded("recompute", num_blocks=9)
    harness.add(make_request("a", 8, max_tokens=20))
    harness.add(make_request("b", 8, best_of=2, max_tokens=10, arrival=1.0))
    step_until(harness, lambda: harness.core.state.preempted)
    (group,) = harness.core.state.preempted
    assert group.request.request_id == "b"
    assert len(group.live) == 2
    assert not any(seq.block_table or seq.row is not None for seq in group.live)
    finish(harness)


def test_without_room_on_the_host_it_recomputes() -> None:
    """Swapping is a wish; a victim gives its blocks back either way."""
    harness = _crowded("swap", num_host_blocks=1, num_blocks=8)
    for index in range(3):
        harness.add(make_request(f"r{index}", 8, max_tokens=12, arrival=float(index)))
    finish(harness)
    recomputes, swaps = _num_preemptions(harness)
    assert recomputes > 0
    assert swaps == 0


@pytest.mark.parametrize(("ns_per_block", "swaps"), [(10, True), (10_000_000, False)])
def test_the_cheaper_way_is_taken(ns_per_block: int, swaps: bool) -> None:
    """After the first swap, which is the measurement, it goes by cost."""
    harness = _crowded("auto", num_blocks=8)
    harness.model.ns_per_block = ns_per_block
    for index in range(10):
        harness.add(make_request(f"r{index}", 8, max_tokens=12, arrival=float(index)))
    finish(harness)
    recomputes, swaps_done = _num_preemptions(harness)
    if swaps:
        assert swaps_done > recomputes
    else:
        assert recomputes > 0
        assert swaps_done == 1


def test_a_block_freed_in_one_step_is_not_written_by_another_in_flight() -> None:
    """What a cancelled or preempted request held comes into no table before the steps in
    flight are over; the harness compares every plan with those in flight.
    """
    harness = _crowded("recompute", max_steps_in_flight=3, num_blocks=8)
    for index in range(6):
        harness.add(make_request(f"r{index}", 7, max_tokens=9, arrival=float(index)))
    harness.plan()
    harness.plan()
    harness.cancel("r0")
    assert harness.core.state.blocks.num_fenced > 0
    finish(harness)


def test_fenced_blocks_start_no_cascade_of_preemptions() -> None:
    """One victim is enough: who needs its blocks stalls for a step, and nobody else goes."""
    harness = _crowded("recompute", num_blocks=12, max_steps_in_flight=2)
    for index in range(4):
        harness.add(make_request(f"r{index}", 11, max_tokens=5, arrival=float(index)))
    harness.plan()  # prefill: three blocks each, one slot left
    harness.plan()  # the first token of each fills its last block
    assert not harness.core.state.preempted
    harness.apply()
    harness.plan()  # all four need a block, none is free, and steps are in flight
    preempted = [g.request.request_id for g in harness.core.state.preempted]
    assert preempted == ["r3"]
    for _ in range(4):
        harness.plan()
    assert [g.request.request_id for g in harness.core.state.preempted] == ["r3"]
    finish(harness)
    assert harness.core.state.counters.num_recompute_preemptions == 1


def test_a_swapped_request_that_gives_up_its_rows_keeps_the_host_blocks_for_the_step() -> None:
    """It is moved out, loses its rows to an urgent request, and another is moved out, all in
    one plan: no two of its moves have one destination.
    """
    harness = make_harness(
        num_blocks=9,
        num_host_blocks=3,
        preemption="swap",
        max_num_seqs=3,
        prefix_cache=False,
    )
    harness.add(make_request("grows", 12, max_tokens=8, priority=2))
    harness.add(make_request("second", 12, max_tokens=8, arrival=1.0))
    harness.add(make_request("first", 12, max_tokens=8, arrival=2.0))
    harness.step()
    harness.add(make_request("urgent", 20, max_tokens=8, priority=1, arrival=3.0))
    plan = harness.plan()
    assert len(plan.swap_out_host_blocks) == 3
    assert len(harness.core.state.preempted) == 2
    finish(harness)


def test_a_preempted_request_keeps_the_token_that_was_on_its_way() -> None:
    """The step in flight did compute it; it is not drawn twice."""
    harness = make_harness(num_blocks=4, max_steps_in_flight=2, prefix_cache=False)
    harness.add(make_request("a", 7, max_tokens=8))
    harness.add(make_request("b", 7, max_tokens=8, arrival=1.0))
    harness.plan()
    group = harness.core.state.groups["b"]
    for _ in range(20):
        harness.plan()
        if group.status is GroupStatus.PREEMPTED:
            break
        harness.apply()
    assert group.status is GroupStatus.PREEMPTED
    before = len(harness.tokens.get(("b", 0), []))
    while harness.pending:
        harness.apply()
    assert len(harness.tokens["b", 0]) > before
    finish(harness)
