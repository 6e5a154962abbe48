"""What preempting costs, from what steps took."""

from __future__ import annotations

import pytest

from scheduler_svc.core.cost import CostModel
from scheduler_svc.core.step import StepTimings


def _learned(*, ns_per_token: int, ns_per_block: int) -> CostModel:
    costs = CostModel()
    costs.observe(StepTimings(forward_ns=100 * ns_per_token), 100, 0)
    costs.observe(StepTimings(forward_ns=10 * ns_per_block, move_ns=10 * ns_per_block), 0, 10)
    return costs


def test_without_measurements_it_recomputes() -> None:
    """That needs no memory on the host."""
    assert not CostModel().prefers_swap(num_tokens=10_000, num_blocks=1)


def test_the_first_swap_is_the_measurement() -> None:
    """Once prefills are known, moving is tried."""
    costs = CostModel()
    costs.observe(StepTimings(forward_ns=1000), 10, 0)
    assert costs.prefers_swap(num_tokens=1, num_blocks=1000)


@pytest.mark.parametrize(("num_tokens", "swaps"), [(39, False), (41, True)])
def test_it_takes_the_cheaper_way(num_tokens: int, swaps: bool) -> None:
    """Blocks are moved out and back: two blocks at 1000 ns cost as much as 40 tokens at 100."""
    costs = _learned(ns_per_token=100, ns_per_block=1000)
    assert costs.prefers_swap(num_tokens=num_tokens, num_blocks=2) is swaps


def test_moving_is_not_counted_as_computing() -> None:
    """A step that prefills and moves teaches both rates apart."""
    costs = CostModel()
    costs.observe(StepTimings(forward_ns=1500, move_ns=500), 10, 5)
    assert costs.prefill_ns_per_token == 100
    assert costs.move_ns_per_block == 100


def test_rates_follow_what_changes() -> None:
    """One slow step does not decide, many do."""
    costs = _learned(ns_per_token=100, ns_per_block=1000)
    costs.observe(StepTimings(forward_ns=100 * 1000), 100, 0)
    assert 100 < costs.prefill_ns_per_token < 500
    for _ in range(40):
        costs.observe(StepTimings(forward_ns=100 * 1000), 100, 0)
    assert costs.prefill_ns_per_token == pytest.approx(1000, rel=0.01)


def test_steps_without_timings_teach_nothing() -> None:
    """An executor that does not measure leaves the model as it was."""
    costs = CostModel()
    costs.observe(StepTimings(), 10, 10)
    assert costs.prefill_ns_per_token is None
    assert costs.move_ns_per_block is None
