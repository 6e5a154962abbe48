"""What is told of a request: who waits for what, who lost out to whom.

That events agree with what really happens is checked by the harness after every transition of
every property test (`CoreHarness._follow`); here is what they say.
"""

from __future__ import annotations

import pytest

from scheduler_svc.core.events import EventKind
from tests.support.core_builders import finish, make_harness, make_request, step_until
from tests.support.core_harness import CoreHarness

K = EventKind


def told(harness: CoreHarness, name: str) -> list[EventKind]:
    return [event.kind for event in harness.events.get(name, [])]


@pytest.mark.parametrize(
    ("preemption", "out", "back"),
    [
        ("recompute", K.PREEMPTED_RECOMPUTE, K.RESUMED),
        ("swap", K.PREEMPTED_SWAP, K.SWAPPED_IN),
    ],
)
def test_a_victim_is_told_who_needed_its_blocks(
    preemption: str, out: EventKind, back: EventKind
) -> None:
    harness = make_harness(num_blocks=9, num_host_blocks=20, preemption=preemption)
    harness.add(make_request("low", 8, max_tokens=16))
    step_until(harness, lambda: len(harness.tokens.get(("low", 0), [])) >= 3)
    harness.add(make_request("urgent", 24, max_tokens=4, priority=1, arrival=1.0))
    finish(harness)
    (event,) = (e for e in harness.events["low"] if e.kind is out)
    assert event.other_request_id == "urgent"
    assert event.num_tokens >= 10
    kinds = told(harness, "low")
    assert kinds.index(back) > kinds.index(out)
    assert out not in told(harness, "urgent")


def test_who_is_last_in_line_gives_way_to_nobody() -> None:
    harness = make_harness(num_blocks=6)
    harness.add(make_request("first", 8, max_tokens=13))
    harness.add(make_request("second", 8, max_tokens=13, arrival=1.0))
    step_until(harness, lambda: harness.core.state.preempted)
    (event,) = (e for e in harness.events["second"] if e.kind is K.PREEMPTED_RECOMPUTE)
    assert event.other_request_id == "first" or "last in line" in event.detail
    finish(harness)


@pytest.mark.parametrize(
    ("changes", "prompt", "detail"),
    [
        ({"num_blocks": 10}, 30, "too few KV blocks are free: it needs 8 of 5"),
        ({"max_num_seqs": 1}, 4, "too many sequences run: 1 more do not fit beside 1"),
        ({"max_num_batched_tokens": 20}, 8, "the step's budget of tokens is spent"),
    ],
)
def test_the_next_in_line_is_told_what_it_waits_for(
    changes: dict[str, object], prompt: int, detail: str
) -> None:
    """Once, though it waits for many steps; and who holds the most."""
    harness = make_harness(**changes)
    harness.add(make_request("holder", 20, max_tokens=12))
    harness.add(make_request("next", prompt, max_tokens=2, arrival=1.0))
    harness.add(make_request("behind", prompt, max_tokens=2, arrival=2.0))
    harness.step()
    assert told(harness, "next") == [K.BLOCKED] and told(harness, "behind") == []
    (event,) = harness.events["next"]
    assert event.detail.startswith(detail)
    assert event.other_request_id == "holder"
    for _ in range(3):
        harness.step()
    assert told(harness, "next").count(K.BLOCKED) == 1
    finish(harness)
    assert "next" in harness.admitted


def test_a_suspect_is_told_why_it_runs_apart() -> None:
    harness = make_harness(max_steps_in_flight=2)
    for name in "ab":
        harness.add(make_request(name, 4, max_tokens=6))
    harness.step()
    harness.plan()
    harness.fail()
    harness.step()
    blocked = [e for e in harness.events["b"] if e.kind is K.BLOCKED]
    assert blocked and "apart" in blocked[0].detail
    assert K.EXECUTOR_LOST in told(harness, "a") and K.EXECUTOR_LOST in told(harness, "b")
    finish(harness)


def test_a_request_that_moves_is_told_so_where_it_goes() -> None:
    source = make_harness(max_steps_in_flight=2)
    target = source.beside(source.config)
    source.add(make_request("ran", 4, max_tokens=6))
    source.step()
    source.add(make_request("waited", 4, max_tokens=6, arrival=1.0))
    source.move_to(target, died=True)
    assert told(source, "ran") == [K.EXECUTOR_LOST, K.MOVED]
    assert told(source, "waited") == [K.MOVED]
    finish(target)
    assert told(source, "ran")[2:] == [K.RESUMED]


def test_an_untroubled_request_has_nothing_to_tell() -> None:
    harness = make_harness()
    harness.add(make_request("a", 9, best_of=3, max_tokens=12))
    finish(harness)
    assert harness.events == {} and harness.admitted == ["a"]
