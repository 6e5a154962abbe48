"""Requests as they come, go, end and survive."""

from __future__ import annotations

import pytest

from scheduler_svc.core.request import BeamParams, FinishReason
from scheduler_svc.core.state import CoreConfig
from scheduler_svc.core.step import StepError, StepErrorKind
from scheduler_svc.errors import DuplicateRequest, NeverFits, QueueFull
from tests.support.core_builders import finish, make_config, make_harness, make_request
from tests.support.core_harness import smaller


def test_a_live_id_is_refused_and_the_first_request_is_untouched() -> None:
    """When it is over, its id may be used again."""
    harness = make_harness()
    harness.add(make_request("r", 4))
    with pytest.raises(DuplicateRequest):
        harness.core.add(make_request("r", 5))
    finish(harness)
    harness.core.add(make_request("r", 5))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": 250, "max_tokens": 1},  # within any context limit, larger than the pool
        {"prompt": 10, "max_tokens": 300},
        {"prompt": 10, "max_tokens": 100, "best_of": 4},
        {"prompt": 4, "best_of": 9},
        {"prompt": 4, "best_of": 9, "beam": BeamParams(9)},
    ],
)
def test_what_can_never_run_is_refused_at_once_and_nothing_queues_behind_it(changes) -> None:
    """The message says what it needs and what there is; the next request runs."""
    harness = make_harness(num_blocks=60)
    prompt = changes.pop("prompt")
    with pytest.raises(NeverFits, match=r"\d+"):
        harness.core.add(make_request("large", prompt, **changes))
    assert not harness.core.has_requests
    harness.add(make_request("small", 4))
    finish(harness)
    assert harness.ends["small", 0] is FinishReason.LENGTH


def test_what_just_fits_runs() -> None:
    """The bound is exact: the whole pool for one request."""
    harness = make_harness(num_blocks=5)
    harness.add(make_request("all", 12, max_tokens=9))
    finish(harness)
    with pytest.raises(NeverFits):
        harness.core.add(make_request("more", 12, max_tokens=10))


def test_a_full_queue_refuses_with_a_delay_and_accepted_requests_go_on() -> None:
    """It counts those that wait, not those that run."""
    harness = make_harness(max_queue=2, max_num_seqs=1, max_num_batched_tokens=2)
    harness.add(make_request("a", 1))
    harness.step()
    harness.add(make_request("b", 1))
    harness.add(make_request("c", 1))
    with pytest.raises(QueueFull) as refused:
        harness.core.add(make_request("d", 1))
    assert refused.value.retry_seconds > 0
    finish(harness)
    assert sorted(harness.admitted) == ["a", "b", "c"]


def test_a_cancel_before_during_twice_and_after_is_harmless() -> None:
    """There is one end, whenever it comes."""
    harness = make_harness(max_steps_in_flight=2)
    assert not harness.cancel("r")
    harness.add(make_request("r", 6, best_of=3))
    harness.plan()
    harness.plan()
    assert harness.cancel("r")
    assert not harness.cancel("r")
    assert [harness.ends["r", index] for index in range(3)] == [FinishReason.CANCELLED] * 3
    finish(harness)
    assert not harness.cancel("r")
    assert harness.core.state.counters.num_cancelled == 1


@pytest.mark.parametrize("num_plans", [0, 1, 2])
def test_every_choice_has_an_end_although_it_never_forked(num_plans: int) -> None:
    """Cancelled in the queue or in mid-prefill, all n samples are told."""
    harness = make_harness(max_num_batched_tokens=9)
    harness.add(make_request("r", 30, best_of=4))
    for _ in range(num_plans):
        harness.step()
    harness.cancel("r")
    assert {index for _, index in harness.ends} == {0, 1, 2, 3}
    finish(harness)


def test_many_cancels_leave_the_pool_as_it_was() -> None:
    """Two hundred clients that hang up at different times free all that they held."""
    harness = make_harness(max_steps_in_flight=2, num_blocks=40)
    for count in range(200):
        harness.add(make_request(f"r{count}", 5 + count % 7, best_of=1 + count % 3))
        for _ in range(count % 4):
            harness.plan()
        harness.cancel(f"r{count}")
        harness.apply()
    while harness.apply():
        pass
    pool = harness.core.state.blocks.pool
    assert (pool.num_referenced, harness.core.state.blocks.num_fenced) == (0, 0)
    finish(harness)


def test_a_cancel_frees_blocks_within_the_steps_in_flight() -> None:
    """They are fenced by the newest step in flight and free with its result."""
    harness = make_harness(max_steps_in_flight=2, prefix_cache=False)
    harness.add(make_request("r", 20))
    harness.plan()
    harness.plan()
    harness.cancel("r")
    harness.apply()
    harness.apply()
    pool = harness.core.state.blocks.pool
    assert pool.num_free == pool.num_total


def test_stopping_a_choice_leaves_its_siblings() -> None:
    """It ends with STOP, once."""
    harness = make_harness()
    harness.add(make_request("r", 5, best_of=2, max_tokens=9))
    harness.step()
    harness.step()
    assert harness.stop("r", 0)
    assert not harness.stop("r", 0)
    assert harness.ends == {("r", 0): FinishReason.STOP}
    finish(harness)
    assert len(harness.tokens["r", 1]) == 9


def test_nothing_is_stopped_before_the_samples_have_forked() -> None:
    """There is no text yet; the request goes on as if nobody had asked."""
    harness = make_harness(max_num_batched_tokens=9)
    harness.add(make_request("r", 20, best_of=2))
    harness.step()
    assert not harness.core.stop("r", 0)
    finish(harness)


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_deadline_ends_a_request_wherever_it_is(when: str) -> None:
    """With the next plan, and the reason says so."""
    harness = make_harness()
    harness.add(make_request("r", 5, max_tokens=50, deadline=10.0))
    if when == "running":
        harness.step()
    harness.advance(9.9)
    harness.step()
    assert harness.core.has_requests
    harness.advance(0.1)
    harness.step()
    assert harness.ends["r", 0] is FinishReason.CANCELLED
    assert "deadline" in harness.errors["r", 0]
    finish(harness)


def test_deadlines_of_finished_requests_do_not_pile_up() -> None:
    """Memory follows the live requests."""
    harness = make_harness()
    for count in range(500):
        harness.add(make_request(f"r{count}", 2, max_tokens=1, deadline=1e9))
        harness.drain()
    assert len(harness.core._deadlines) < 100


def test_a_resumed_request_goes_on_after_the_tokens_that_the_client_has() -> None:
    """The whole is what it would have been in one piece."""
    harness = make_harness()
    harness.add(make_request("r", 6, best_of=2, max_tokens=9))
    finish(harness)
    whole = [harness.tokens["r", index] for index in range(2)]
    again = make_harness()
    resumed = {0: tuple(whole[0][:4]), 1: tuple(whole[1][:7])}
    again.add(make_request("r", 6, best_of=2, max_tokens=9, resumed=resumed))
    finish(again)
    assert [again.tokens["r", 0], again.tokens["r", 1]] == [whole[0][4:], whole[1][7:]]


def test_a_resumed_choice_that_was_complete_ends_at_once() -> None:
    """Without a step, with the reason that it had."""
    harness = make_harness()
    resumed = {0: (7, 8, 9), 1: (5, 0)}
    harness.add(
        make_request(
            "r", 4, best_of=2, max_tokens=3, resumed=resumed, stop_token_ids=frozenset({0})
        )
    )
    assert harness.ends == {("r", 0): FinishReason.LENGTH, ("r", 1): FinishReason.STOP}
    assert not harness.core.has_requests
    assert harness.plan() is None


@pytest.mark.parametrize("num_steps", range(8))
def test_a_lost_executor_costs_time_and_no_token(num_steps: int) -> None:
    """Whatever was in flight, prefilled, decoding or out, comes back the same."""
    harness = make_harness(
        max_steps_in_flight=2, num_blocks=16, num_host_blocks=16, preemption="swap"
    )
    harness.add(make_request("a", 10, best_of=2, max_tokens=8))
    harness.add(make_request("b", 14, max_tokens=8, arrival=1.0))
    harness.add(make_request("c", 6, best_of=2, beam=BeamParams(2), max_tokens=6, arrival=2.0))
    for _ in range(num_steps):
        harness.plan()
        harness.plan()
        harness.apply()
    harness.restart()
    finish(harness)
    assert set(harness.ends.values()) == {FinishReason.LENGTH}


def test_what_fits_no_executor_any_more_ends_with_an_error() -> None:
    """After a restart with a smaller pool it would wait for ever, and all behind it."""
    harness = make_harness(num_blocks=40)
    harness.add(make_request("running", 60, max_tokens=20))
    harness.step()
    harness.add(make_request("waiting", 4, best_of=8, arrival=1.0))
    harness.add(make_request("small", 4, arrival=2.0))
    harness.restart(smaller(harness.config, num_blocks=10, max_num_seqs=4))
    assert harness.ends["running", 0] is FinishReason.ERROR
    assert "pool" in harness.errors["running", 0]
    assert harness.ends["waiting", 7] is FinishReason.ERROR
    finish(harness)
    assert harness.ends["small", 0] is FinishReason.LENGTH


def test_another_block_size_gives_no_false_hits() -> None:
    """Names made with the old size stand for other contents."""
    harness = make_harness(block_size=4, max_num_seqs=2)
    common = [1, 2, 3, 4]
    harness.add(make_request("x", 4, best_of=2, max_tokens=20))
    harness.step()
    harness.add(make_request("a", [*common, 5, 6, 7, 8, 9], max_tokens=2, arrival=1.0))
    harness.add(make_request("between", 4, best_of=2, max_tokens=2, arrival=2.0))
    harness.add(make_request("b", [*common, 9, 8, 7, 6, 5], max_tokens=2, arrival=3.0))
    for name in "ab":  # as the scheduler does when it looks whether they fit
        harness.core.state.blocks.match_prefix(harness.core.state.groups[name].live[0])
    harness.restart(smaller(harness.config, block_size=8))
    finish(harness)
    assert harness.admitted == ["x", "a", "between", "b"]


def test_of_a_poisoned_crowd_only_the_poison_fails() -> None:
    """A request that makes its steps fail is found out, and the others finish."""
    harness = make_harness(max_steps_in_flight=2)
    for name in ("a", "b", "poison", "c", "d"):
        harness.add(make_request(name, 5, max_tokens=6))
    num_failures = 0
    while harness.core.has_requests:
        harness.plan()
        if not harness.pending:
            continue
        record = harness.core.state.in_flight[0]
        members = {s.group.request.request_id for s in record.sampled}
        members |= {s.group.request.request_id for s, _, _ in record.chunks}
        if "poison" in members and "poison" in harness.core.state.groups:
            num_failures += 1
            harness.fail(StepErrorKind.INTERNAL)
        else:
            harness.apply()
    assert num_failures == 2
    assert harness.interrupted == {"poison"}
    assert harness.ends["poison", 0] is FinishReason.ERROR
    finish(harness)


def test_lack_of_memory_is_nobodys_fault() -> None:
    """Steps that ran out of memory are tried again with fewer requests at once."""
    harness = make_harness()
    for name in "abc":
        harness.add(make_request(name, 4))
    for _ in range(2):
        harness.plan()
        harness.fail(StepErrorKind.OUT_OF_MEMORY)
    finish(harness)
    assert set(harness.ends.values()) == {FinishReason.LENGTH}


def test_no_more_steps_are_in_flight_than_allowed() -> None:
    """Another plan comes only after a result."""
    for depth in (1, 2, 3):
        harness = make_harness(max_steps_in_flight=depth)
        harness.add(make_request("r", 4))
        assert [harness.plan() is not None for _ in range(depth + 1)] == [True] * depth + [False]
        finish(harness)


def test_an_idle_core_plans_nothing() -> None:
    """And keeps no work for rows that ended: they leave with the next plan."""
    harness = make_harness()
    assert harness.plan() is None
    harness.add(make_request("r", 4, max_tokens=1))
    harness.step()
    assert harness.plan() is None
    harness.add(make_request("s", 4))
    assert harness.plan().finish_rows == [0]


def test_results_come_in_the_order_of_plans() -> None:
    """Another order is a bug of the caller."""
    harness = make_harness(max_steps_in_flight=2)
    harness.add(make_request("r", 4))
    harness.plan()
    harness.plan()
    with pytest.raises(AssertionError, match="order"):
        harness.core.apply(harness.pending[1][1])


def test_after_a_failure_the_core_waits_for_a_restart() -> None:
    """A cancel in between is in order; nothing of the lost executor is planned again."""
    harness = make_harness()
    harness.add(make_request("a", 4))
    harness.add(make_request("b", 4))
    harness.plan()
    harness.core.fail(StepError(StepErrorKind.INTERNAL, "made up"))
    assert harness.core.cancel("a")
    harness.interrupted.add("a")
    harness.restart()
    finish(harness)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_batched_tokens": 8, "max_num_seqs": 8}, "max_num_batched_tokens"),
        ({"preemption": "never"}, "preemption"),
        ({"policy": "lottery"}, "policy"),
    ],
)
def test_a_configuration_that_could_not_work_is_refused(changes, message) -> None:
    """With the name of the setting."""
    with pytest.raises(ValueError, match=message):
        CoreConfig(num_blocks=4, **changes)
    make_config()
