"""What preempting costs, from what steps took."""

from __future__ import annotations

import pytest

from scheduler_svc.core.cost import CostModel
from scheduler_svc.core.step import StepTimings


def _learned(*, ns_per_token: int, ns_per_block: int) -> CostModel:
    costs = CostModel()
    costs.observe(StepTimings(forward_ns=100 * ns_per_token), num_prefilled=100)
    costs.observe(
        StepTimings(forward_ns=10 * ns_per_block, move_ns=10 * ns_per_block), num_moved_blocks=10
    )
    return costs


def test_without_measurements_it_recomputes() -> None:
    """That needs no memory on the host."""
    assert not CostModel().prefers_swap(num_tokens=10_000, num_blocks=1)


def test_the_first_swap_is_the_measurement() -> None:
    """Once prefills are known, moving is tried."""
    costs = CostModel()
    costs.observe(StepTimings(forward_ns=1000), num_prefilled=10)
    assert costs.prefers_swap(num_tokens=1, num_blocks=1000)


@pytest.mark.parametrize(("num_tokens", "swaps"), [(39, False), (41, True)])
def test_it_takes_the_cheaper_way(num_tokens: int, swaps: bool) -> None:
    """Blocks are moved out and back: two blocks at 1000 ns cost as much as 40 tokens at 100."""
    costs = _learned(ns_per_token=100, ns_per_block=1000)
    assert costs.prefers_swap(num_tokens=num_tokens, num_blocks=2) is swaps


def test_moving_is_not_counted_as_computing() -> None:
    """A step that prefills and moves teaches both rates apart."""
    costs = CostModel()
    costs.observe(StepTimings(forward_ns=1500, move_ns=500), num_prefilled=10, num_moved_blocks=5)
    assert costs.prefill_ns_per_token == 100
    assert costs.move_ns_per_block == 100


def test_rates_follow_what_changes() -> None:
    """One slow step does not decide, many do."""
    costs = _learned(ns_per_token=100, ns_per_block=1000)
    costs.observe(StepTimings(forward_ns=100 * 1000), num_prefilled=100)
    assert 100 < costs.prefill_ns_per_token < 500
    for _ in range(40):
        costs.observe(StepTimings(forward_ns=100 * 1000), num_prefilled=100)
    assert costs.prefill_ns_per_token == pytest.approx(1000, rel=0.01)


def test_steps_without_timings_teach_nothing() -> None:
    """An executor that does not measure leaves the model as it was."""
    costs = CostModel()
    costs.observe(StepTimings(), num_prefilled=10, num_moved_blocks=10)
    assert costs.prefill_ns_per_token is None
    assert costs.move_ns_per_block is None


def test_a_prefilled_token_costs_what_it_adds() -> None:
    """The decodes beside it would have been computed anyway."""
    costs = CostModel()
    costs.observe(StepTimings(forward_ns=4000), num_decodes=8)
    costs.observe(StepTimings(forward_ns=5000), num_prefilled=10, num_decodes=8)
    assert costs.prefill_ns_per_token == 100
    alone = CostModel()
    alone.observe(StepTimings(forward_ns=4000), num_decodes=8)
    alone.observe(StepTimings(forward_ns=5000), num_prefilled=10)
    assert alone.prefill_ns_per_token == 500


def test_a_step_that_seems_faster_than_its_decodes_teaches_no_nonsense() -> None:
    """Times vary: a token never costs nothing, and steps that mostly decode say nothing."""
    costs = CostModel()
    costs.observe(StepTimings(forward_ns=4000), num_decodes=8)
    costs.observe(StepTimings(forward_ns=3000), num_prefilled=10, num_decodes=8)
    assert costs.prefill_ns_per_token == pytest.approx(30)
    costs.observe(StepTimings(forward_ns=90_000), num_prefilled=1, num_decodes=8)
    assert costs.prefill_ns_per_token == pytest.approx(30)
