"""What a step's result brings, also for those who have moved on meanwhile."""

from __future__ import annotations

import pytest

from scheduler_svc.core.request import BeamParams, FinishReason
from scheduler_svc.core.results import find_fault
from scheduler_svc.core.step import StepError, StepErrorKind, StepResult, StepTimings
from tests.support.core_builders import finish, make_harness, make_request
from tests.support.executor_model import expected_output


def _stops_at(name: str, position: int, **changes: object):
    """A request whose stop token is the one that it draws at this position."""
    output = expected_output(make_request(name, 5, max_tokens=20), 0)
    return make_request(
        name, 5, max_tokens=20, stop_token_ids=frozenset({output[position]}), **changes
    ), output.index(output[position]) + 1


def test_a_stop_token_ends_a_choice_and_one_token_is_discarded() -> None:
    """The step planned before it was known has drawn one too many; nobody sees it."""
    harness = make_harness(max_steps_in_flight=2)
    request, length = _stops_at("r", 3)
    harness.add(request)
    finish(harness)
    assert len(harness.tokens["r", 0]) == length
    assert harness.ends["r", 0] is FinishReason.STOP
    assert harness.core.state.counters.num_discarded_tokens == 1


def test_a_length_limit_discards_nothing() -> None:
    """It is known ahead, so no step is planned beyond it."""
    harness = make_harness(max_steps_in_flight=3)
    harness.add(make_request("r", 5, max_tokens=7, best_of=2))
    finish(harness)
    assert harness.core.state.counters.num_discarded_tokens == 0
    assert harness.ends == {("r", 0): FinishReason.LENGTH, ("r", 1): FinishReason.LENGTH}


@pytest.mark.parametrize("best_of", [1, 3])
def test_with_max_tokens_zero_the_prompt_is_computed_and_nothing_else(best_of: int) -> None:
    """Its log-probabilities come, each once, and no token's."""
    harness = make_harness(max_num_batched_tokens=9)
    harness.add(
        make_request("r", 20, max_tokens=0, best_of=best_of, num_prompt_logprobs=0, num_logprobs=0)
    )
    finish(harness)
    assert harness.tokens == {}
    assert harness.num_logprobs == {}
    assert len(harness.prompt_logprobs["r"]) == 19
    assert set(harness.ends.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_prompt_logprobs_come_once_although_the_prompt_is_computed_twice(preemption) -> None:
    """In order and without a gap, whenever the request is pushed out."""
    for num_steps in range(1, 8):
        harness = make_harness(
            max_num_batched_tokens=9, num_host_blocks=20, preemption=preemption, num_blocks=14
        )
        harness.add(make_request("r", 22, best_of=2, num_prompt_logprobs=0))
        for _ in range(num_steps):
            harness.plan()
            harness.apply()
        harness.add(make_request("urgent", 40, max_tokens=2, priority=1))
        finish(harness)
        assert harness.core.state.groups == {}


def test_logprobs_come_with_the_tokens_that_are_kept() -> None:
    """As many as tokens, and their sum; a discarded token has none."""
    harness = make_harness(max_steps_in_flight=2)
    request, length = _stops_at("r", 3, num_logprobs=2)
    group = harness.core.add(request)
    harness.requests["r"] = request
    finish(harness)
    assert harness.num_logprobs["r", 0] == length
    assert group.sequences[0].cumulative_logprob == pytest.approx(-0.5 * length)


def test_a_row_error_ends_its_request_alone() -> None:
    """All choices of it, with the executor's message; the others go on."""
    harness = make_harness()
    harness.add(make_request("bad", 4, best_of=2))
    harness.add(make_request("good", 4))
    harness.step()
    harness.plan()
    _, result, _ = harness.pending[0]
    row = harness.core.state.groups["bad"].live[1].row
    result.row_errors[row] = "not a number"
    harness.interrupted.add("bad")
    harness.apply()
    assert harness.ends["bad", 0] is harness.ends["bad", 1] is FinishReason.ERROR
    assert harness.errors["bad", 0] == "not a number"
    finish(harness)
    assert harness.ends["good", 0] is FinishReason.LENGTH


def test_settled_blocks_get_names_as_they_fill() -> None:
    """Of the prompt, and of the output; the block being written has none."""
    harness = make_harness()
    harness.add(make_request("r", 6, max_tokens=9))
    for _ in range(4):
        harness.step()
    group = harness.core.state.groups["r"]
    named = [seq.num_registered for seq in group.live]
    assert named == [2], "6 + 3 tokens are computed: two full blocks of four"
    finish(harness)
    assert harness.core.state.blocks.pool.num_cached == 3


def test_beam_steps_do_not_count_as_prompt_tokens() -> None:
    """They teach the cost model nothing about prefills either."""
    from scheduler_svc.core.request import BeamParams

    harness = make_harness()
    harness.add(make_request("r", 6, best_of=2, beam=BeamParams(2), max_tokens=6))
    finish(harness)
    assert harness.core.state.counters.num_prompt_tokens == 6
    assert harness.core.costs.prefill_ns_per_token == harness.model.ns_per_token


def test_waiting_for_a_plan_is_idleness_and_waiting_for_a_request_is_not() -> None:
    """The first step after a claim, and after a pause without requests, waited for work."""
    core = make_harness().core
    timings = StepTimings(idle_ns=100, prepare_ns=1, forward_ns=20, sample_ns=3, move_ns=7)

    def step() -> None:
        plan = core.plan(0.0)
        assert plan is not None
        sampled = core.state.in_flight[0].sampled
        core.apply(StepResult(plan.step_id, [1] * len(sampled), timings=timings))

    for name in ("first", "second"):
        core.add(make_request(name, 3, max_tokens=3))
        for _ in range(3):
            step()
        assert not core.has_requests
    assert core.state.counters.executor_busy_ns == 6 * 24
    assert core.state.counters.executor_idle_ns == 2 * 2 * 100
    core.add(make_request("moved", 3, max_tokens=5))
    step()
    step()
    core.restart(core.state.config)
    step()
    step()
    assert core.state.counters.executor_idle_ns == (2 * 2 + 1 + 1) * 100


def test_a_result_is_judged_before_it_is_taken_in() -> None:
    """Each fault by its name; a sound result, and a failed step, have none."""
    harness = make_harness()
    state = harness.core.state
    harness.add(make_request("r", 5, max_tokens=3))
    assert "none was due" in (find_fault(state, StepResult(1, [7]), 50) or "")
    plan = harness.plan()
    assert plan is not None
    step = plan.step_id
    assert find_fault(state, StepResult(step, [7]), 50) is None
    assert find_fault(state, StepResult(step, [7]), 0) is None
    failed = StepResult(step, [], error=StepError(StepErrorKind.INTERNAL, "broken"))
    assert find_fault(state, failed, 50) is None
    for result, part in (
        (StepResult(step + 1, [7]), f"where {step} was due"),
        (StepResult(step, [7, 8]), "2 tokens came for 1 rows"),
        (StepResult(step, []), "0 tokens came for 1 rows"),
        (StepResult(step, [50]), "token 50"),
    ):
        assert part in (find_fault(state, result, 50) or "")
    finish(harness)


def test_a_beam_needs_candidates() -> None:
    """Or an error of its row; without either the search would wait for ever."""
    harness = make_harness()
    harness.add(make_request("beam", 5, max_tokens=3, n=2, beam=BeamParams(2)))
    plan = harness.plan()
    assert plan is not None
    bare = StepResult(plan.step_id, [7])
    assert "no candidates" in (find_fault(harness.core.state, bare, 50) or "")
    row = harness.core.state.in_flight[0].rows[0]
    failed = StepResult(plan.step_id, [0], row_errors={row: "nan"})
    assert find_fault(harness.core.state, failed, 50) is None
    finish(harness)
