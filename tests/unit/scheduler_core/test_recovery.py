"""What is kept and what is lost when groups leave an executor, and who is blamed."""

from __future__ import annotations

import pytest

from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.sequence import GroupStatus
from scheduler_svc.errors import DuplicateRequest, NeverFits
from tests.support.core_builders import make_harness, make_request
from tests.support.core_harness import CoreHarness, smaller


def pair(**limits: int) -> tuple[CoreHarness, CoreHarness]:
    """Two cores with the same limits and clients."""
    harness = make_harness(**limits)
    return harness, harness.beside(harness.config)


def finish(*harnesses: CoreHarness) -> None:
    """Run all to the end, and check every output."""
    for harness in harnesses:
        harness.drain()
    for harness in harnesses:
        harness.check_finished()


def test_a_move_keeps_tokens_and_place_in_line() -> None:
    """What ran comes before what the other core has waiting, whoever came first."""
    here, there = pair(max_num_seqs=4, max_num_batched_tokens=16)
    here.add(make_request("ran", 5, max_tokens=12, arrival=5.0))
    for _ in range(4):
        here.step()
    here.add(make_request("queued", 5, arrival=6.0))
    there.add(make_request("earlier", 5, arrival=1.0))
    told = list(here.tokens["ran", 0])
    here.move_to(there, died=True)
    assert [g.request.request_id for g in there.core.state.preempted] == ["ran"]
    assert len(there.core.state.waiting) == 2
    assert here.tokens["ran", 0] == told and len(told) > 0
    plan = there.plan()
    assert plan is not None and plan.starts[0].tokens[5:] == told
    finish(here, there)


def test_moves_of_samples_beams_and_swapped_groups() -> None:
    """Groups go as a whole, in whatever state they are."""
    here, there = pair(num_blocks=30, num_host_blocks=60, max_num_batched_tokens=40)
    here.add(make_request("n", 9, best_of=3, max_tokens=14))
    here.add(make_request("one", 4, max_tokens=10, arrival=1.0))
    for _ in range(5):
        here.plan()
        here.apply()
    here.plan()
    here.move_to(there, died=False)
    there.plan()
    there.move_to(here, died=True)
    finish(here, there)
    assert len(here.tokens["n", 2]) == 14


def test_what_fits_nowhere_else_stays() -> None:
    """A core refuses what is larger than its pool, and knows so before."""
    here = make_harness(num_blocks=64)
    there = here.beside(smaller(here.config, num_blocks=4))
    here.add(make_request("large", 100, max_tokens=20))
    here.add(make_request("small", 4, max_tokens=2, arrival=1.0))
    here.step()
    here.move_to(there, died=True)
    assert set(here.core.state.groups) == {"large"}
    assert set(there.core.state.groups) == {"small"}
    (group,) = here.core.state.groups.values()
    assert not there.core.can_hold(group)
    with pytest.raises(NeverFits):
        there.core.adopt(group)
    finish(here, there)


def test_the_same_name_is_not_adopted_twice() -> None:
    """A live request is in one core."""
    here, there = pair()
    here.add(make_request("same", 4))
    there.core.add(make_request("same", 4))
    (group,) = here.core.evacuate()
    with pytest.raises(DuplicateRequest):
        there.core.adopt(group)
    assert group.status is GroupStatus.WAITING


def test_deadlines_move_along() -> None:
    """A request whose deadline passes on its second executor ends there."""
    here, there = pair()
    here.add(make_request("late", 4, max_tokens=30, deadline=3.0))
    here.step()
    here.move_to(there, died=False)
    there.now = 4.0
    there.core.expire(there.now)
    there.interrupted.add("late")
    assert not there.core.has_requests
    there.plan()
    assert there.ends["late", 0] is FinishReason.CANCELLED


def test_load_counts_what_is_still_to_be_computed() -> None:
    """Prompts until they are, outputs as they come, wherever they came from."""
    here, there = pair()
    here.add(make_request("a", 4, max_tokens=8, best_of=2))
    assert here.core.state.load_tokens == 4 + 2 * 8
    loads = []
    for _ in range(3):
        here.step()
        loads.append(here.core.state.load_tokens)
    assert loads == [2 * 8, 2 * 8 - 2, 2 * 8 - 4]
    drawn = len(here.tokens["a", 0]) + len(here.tokens["a", 1])
    here.move_to(there, died=False)
    assert (here.core.state.load_tokens, there.core.state.load_tokens) == (0, 4 + drawn + 2 * 8)
    finish(here, there)
    assert there.core.state.load_tokens == 0


def kill_while_running(here: CoreHarness, poison: str) -> int:
    """Let the executor die whenever a request is in flight; returns how often it died."""
    num_deaths = 0
    while here.core.has_requests:
        here.plan()
        if any(
            group.request.request_id == poison
            for record in here.core.state.in_flight
            for group in [s.group for s in record.sampled] + [c[0].group for c in record.chunks]
        ):
            num_deaths += 1
            here.die()
        else:
            here.apply()
        assert num_deaths < 20, "the poison is never found"
    return num_deaths


def test_a_request_that_kills_executors_is_given_up_alone() -> None:
    """In company it takes a death more, to see who it was."""
    here = make_harness(max_num_seqs=8, max_num_batched_tokens=40)
    for name in ("a", "b", "poison", "c"):
        here.add(make_request(name, 5, max_tokens=6))
    assert kill_while_running(here, "poison") == 3
    assert here.interrupted == {"poison"}
    assert "executors died" in here.errors["poison", 0]
    here.check_finished()


def test_alone_two_deaths_are_enough() -> None:
    """There is nobody else to suspect."""
    here = make_harness()
    here.add(make_request("poison", 5, max_tokens=6))
    assert kill_while_running(here, "poison") == 2
    assert here.ends["poison", 0] is FinishReason.ERROR


def test_suspicion_moves_along() -> None:
    """A poison that kills one executor after another is found all the same."""
    here, there = pair(max_num_seqs=8, max_num_batched_tokens=40)
    for name in ("a", "poison", "b"):
        here.add(make_request(name, 5, max_tokens=6))
    num_deaths = 0
    while here.core.has_requests:
        here.plan()
        flying = {s.group.request.request_id for r in here.core.state.in_flight for s in r.sampled}
        if "poison" not in flying:
            here.apply()
            continue
        num_deaths += 1
        here.move_to(there, died=True)
        here, there = there, here
    assert num_deaths == 3 and here.interrupted == {"poison"}
    finish(here, there)


def test_deaths_far_apart_blame_nobody() -> None:
    """A long stream that runs alone outlives any number of executors."""
    here = make_harness(num_blocks=200)
    here.add(make_request("long", 5, max_tokens=400))
    for _ in range(4):
        for _ in range(80):
            here.step()
        here.plan()
        here.die()
    finish(here)
    assert here.ends["long", 0] is FinishReason.LENGTH


def test_who_resumes_is_a_suspect() -> None:
    """It may have killed its executor at another scheduler: it runs apart from other suspects."""
    here = make_harness()
    for name in "ab":
        here.add(make_request(name, 4, resumed={0: (1, 2)}))
    here.add(make_request("new", 4, arrival=1.0))
    plan = here.plan()
    assert plan is not None and len(plan.starts) == 1
    here.apply()
    finish(here)


def test_an_orderly_end_blames_nobody() -> None:
    """However often an executor is left with a request in flight."""
    here, there = pair()
    here.add(make_request("moved", 5, max_tokens=8))
    for _ in range(6):
        here.plan()
        here.move_to(there, died=False)
        here, there = there, here
    finish(here, there)
    assert here.ends["moved", 0] is FinishReason.LENGTH


def test_cached_prompts_are_counted_for_routing() -> None:
    """By the hashes of the prompt, up to the first block that is not there."""
    from scheduler_svc.core.prefix_cache import prompt_hashes

    here = make_harness(block_size=4)
    prompt = list(range(18))
    here.add(make_request("first", prompt, max_tokens=2))
    finish(here)
    other = make_request("second", [*prompt[:12], 99, 98, 97, 96, 95])
    hashes = prompt_hashes(other, 4)
    assert len(hashes) == 4
    assert here.core.num_cached_tokens(hashes) == 12
    assert here.core.num_cached_tokens(prompt_hashes(make_request("x", 9, tenant="t"), 4)) == 0
    here.core.add(other, hashes)
    here.requests["second"] = other
    finish(here)
    assert here.core.state.counters.num_prefix_hit_tokens == 12
