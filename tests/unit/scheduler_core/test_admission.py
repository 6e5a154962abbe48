"""Who is let in, and when."""

from __future__ import annotations

from scheduler_svc.core.step import StepErrorKind
from tests.support.core_builders import finish, make_harness, make_request, step_until


def test_the_watermark_is_kept_free_at_admission() -> None:
    """Running sequences need it to grow; alone, a request may have everything."""
    harness = make_harness(num_blocks=10, watermark=0.3)
    harness.add(make_request("a", 20, max_tokens=4))
    harness.add(make_request("b", 12, max_tokens=4))
    harness.step()
    assert harness.admitted == ["a"], "5 + 3 of 10 blocks would leave less than 3"
    finish(harness)
    alone = make_harness(num_blocks=10, watermark=0.3)
    alone.add(make_request("all", 36, max_tokens=4))
    alone.step()
    assert alone.admitted == ["all"]
    finish(alone)


def test_nobody_is_overtaken_by_who_fits_better() -> None:
    """A large request at the head of the line is not passed by small ones behind it."""
    harness = make_harness(num_blocks=10)
    harness.add(make_request("a", 20, max_tokens=8))
    harness.add(make_request("large", 30, max_tokens=4, arrival=1.0))
    harness.add(make_request("small", 2, max_tokens=2, arrival=2.0))
    harness.step()
    assert harness.admitted == ["a"]
    finish(harness)
    assert harness.admitted == ["a", "large", "small"]


def _with_preempted(**changes: object):
    """Two requests outgrow the pool, and the later one has been preempted."""
    harness = make_harness(num_blocks=6, **changes)
    harness.add(make_request("first", 8, max_tokens=13))
    harness.add(make_request("second", 8, max_tokens=13, arrival=1.0))
    step_until(harness, lambda: harness.core.state.preempted)
    assert [g.request.request_id for g in harness.core.state.preempted] == ["second"]
    return harness


def test_nothing_new_is_admitted_while_a_preempted_request_waits() -> None:
    """It has had its turn in line; what fits beside it waits all the same."""
    harness = _with_preempted()
    harness.add(make_request("tiny", 1, max_tokens=1, arrival=2.0))
    harness.step()
    assert harness.core.state.blocks.pool.num_available > 0, "it would fit"
    assert "tiny" not in harness.admitted
    step_until(harness, lambda: not harness.core.state.preempted)
    finish(harness)
    assert harness.admitted[-1] == "tiny"


def test_a_higher_priority_passes_a_preempted_request() -> None:
    """Priority goes before the turn in line."""
    harness = _with_preempted()
    harness.add(make_request("urgent", 2, max_tokens=2, priority=1, arrival=2.0))
    harness.step()
    assert harness.core.state.preempted
    assert "urgent" in harness.admitted
    finish(harness)


def test_under_fcfs_priority_passes_nobody() -> None:
    """The policy ignores it."""
    harness = _with_preempted(policy="fcfs")
    harness.add(make_request("urgent", 2, max_tokens=2, priority=1, arrival=2.0))
    harness.step()
    assert "urgent" not in harness.admitted
    finish(harness)


def test_an_urgent_request_preempts_lower_ones_and_they_keep_their_place() -> None:
    """The newest goes first, only as many as needed, and they come back in order."""
    for preemption in ("recompute", "swap"):
        harness = make_harness(num_blocks=9, num_host_blocks=20, preemption=preemption)
        for name, arrival in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
            harness.add(make_request(name, 11, max_tokens=2, arrival=arrival))
        harness.step()
        harness.add(make_request("urgent", 9, max_tokens=4, priority=1, arrival=3.0))
        harness.step()
        state = harness.core.state
        assert [g.request.request_id for g in state.preempted] == ["c"]
        assert state.groups["urgent"].status.value in ("running", "waiting")
        harness.add(make_request("late", 3, max_tokens=2, arrival=4.0))
        finish(harness)
        assert harness.admitted == ["a", "b", "c", "urgent", "late"]


def test_nobody_is_preempted_in_vain() -> None:
    """If all lower requests together do not hold enough, they go on."""
    harness = make_harness(num_blocks=10)
    harness.add(make_request("high", 27, max_tokens=2, priority=5))
    harness.add(make_request("low", 8, max_tokens=4))
    harness.step()
    harness.add(make_request("urgent", 20, max_tokens=4, priority=1, arrival=1.0))
    harness.step()
    assert harness.core.state.counters.num_recompute_preemptions == 0
    finish(harness)


def test_what_a_stalled_request_waits_for_is_not_given_to_another() -> None:
    """Else the other would be let in only to be pushed out again."""
    harness = make_harness(num_blocks=7, max_steps_in_flight=2, prefix_cache=False)
    harness.add(make_request("old", 5, max_tokens=3))
    harness.add(make_request("samples", 8, best_of=3, max_tokens=2, arrival=1.0))
    harness.add(make_request("gone", 4, max_tokens=4, arrival=2.0))
    harness.plan()
    harness.cancel("gone")
    harness.add(make_request("new", 4, max_tokens=2, arrival=3.0))
    harness.plan()  # three samples need a block each: two are free, one is fenced
    assert "new" not in harness.admitted
    finish(harness)
    assert harness.core.state.counters.num_recompute_preemptions == 0


def test_rows_are_kept_for_samples_that_have_not_forked() -> None:
    """A request with n samples enters when n rows are free, and forks without waiting."""
    harness = make_harness(max_num_seqs=4, max_num_batched_tokens=8)
    harness.add(make_request("four", 12, best_of=4))
    harness.add(make_request("one", 2, arrival=1.0))
    harness.step()
    harness.step()
    assert harness.admitted == ["four"]
    finish(harness)


def test_suspects_of_a_failed_step_come_back_one_at_a_time() -> None:
    """So that a second failure tells which of them it was."""
    harness = make_harness()
    for name in "abc":
        harness.add(make_request(name, 4))
    harness.plan()
    harness.fail(StepErrorKind.INTERNAL)
    assert len(harness.plan().starts) == 1
    harness.apply()
    assert len(harness.plan().starts) == 1, "the first drew a token: the second may come"
    finish(harness)
