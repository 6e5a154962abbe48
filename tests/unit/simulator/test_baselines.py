"""Static batching and Orca do what the paper says of them."""

from __future__ import annotations

import pytest

from scheduler_svc.simulator import (
    PAPER_SETUPS,
    BaselineConfig,
    LinearCost,
    Report,
    SimRequest,
    WorkloadError,
    simulate_orca,
    simulate_static,
    workload,
)
from tests.unit.simulator.support import check_all_served

ONE_SECOND = LinearCost("one second", {"fixed": 1.0}, num_blocks=1)
SETUP = PAPER_SETUPS["opt-13b"]


def config(**changes: object) -> BaselineConfig:
    values = {"cost": ONE_SECOND, "num_slots": 256, "max_len": 64}
    return BaselineConfig(**{**values, **changes})


def test_one_request_takes_an_iteration_for_every_token() -> None:
    """The prompt's iteration draws the first of five."""
    for report in (
        simulate_orca(config(), [SimRequest(2.0, 10, 5)]),
        simulate_static(config(), [SimRequest(2.0, 10, 5)]),
    ):
        assert report.ttft.mean == 1.0
        assert report.e2e.mean == 5.0
        assert report.normalized_latency.mean == 1.0
        assert report.itl.p50 == pytest.approx(1.0, rel=0.01)


def test_a_static_batch_ends_as_a_whole() -> None:
    """The short request waits for the long one, and the next batch for both."""
    requests = [SimRequest(0.0, 5, 2), SimRequest(0.0, 5, 10), SimRequest(1.5, 5, 2)]
    report = simulate_static(config(), requests)
    check_all_served(report, requests)
    assert list(report.requests.end) == [10.0, 10.0, 12.0]
    assert list(report.requests.admitted) == [0.0, 0.0, 10.0]


def test_orca_lets_everyone_leave_and_enter_at_every_iteration() -> None:
    """The short one leaves after its two iterations, and the late one enters at the next."""
    requests = [SimRequest(0.0, 5, 2), SimRequest(0.0, 5, 10), SimRequest(1.5, 5, 2)]
    report = simulate_orca(config(), requests)
    check_all_served(report, requests)
    assert list(report.requests.end) == [2.0, 10.0, 4.0]


@pytest.mark.parametrize(("reserve", "at_once"), [("max", 4), ("pow2", 5), ("oracle", 8)])
def test_reservations_limit_the_batch(reserve: str, at_once: int) -> None:
    """256 slots: four of 64; of 8 + 32 in 64 too; of 8 + 17 in 32: eight."""
    requests = [SimRequest(0.0, 8, 17) for _ in range(20)]
    report = simulate_orca(config(reserve=reserve), requests)
    check_all_served(report, requests)
    first = sum(admitted == 0.0 for admitted in report.requests.admitted)
    assert first == {"max": 4, "pow2": 4, "oracle": 8}[reserve] <= at_once


def test_a_static_batch_is_what_fits_at_full_length() -> None:
    """256 slots are four times 64."""
    report = simulate_static(config(), [SimRequest(0.0, 8, 2) for _ in range(20)])
    assert list(report.requests.end) == [2.0 * (1 + i // 4) for i in range(20)]


def test_samples_take_a_place_each() -> None:
    """Nothing is shared: two requests of two samples fill four places."""
    requests = [SimRequest(0.0, 8, 2, n=2) for _ in range(4)]
    report = simulate_orca(config(reserve="max"), requests)
    check_all_served(report, requests)
    assert list(report.requests.end) == [2.0, 2.0, 4.0, 4.0]
    assert report.mean_batched_requests == 2
    assert report.mean_batched_sequences == 4


def test_beams_that_continue_others_are_copied_if_that_is_asked_for() -> None:
    """Of 4 beams with 5, 6 and 7 tokens half are copied: 5, 6 and 7 blocks of 2."""
    cost = LinearCost("copies", {"fixed": 1.0, "per_copied_block": 0.1}, num_blocks=1)
    copied = config(cost=cost, beam_copy_share=0.5, copy_block_size=2)
    beams, samples = SimRequest(0.0, 4, 4, beam_width=4), SimRequest(0.0, 4, 4, n=4)
    # The prompt's iteration, in which nothing is stored yet, and three more.
    assert simulate_orca(copied, [beams]).e2e.mean == pytest.approx(4.0 + 0.5 + 0.6 + 0.7)
    assert simulate_orca(copied, [samples]).e2e.mean == pytest.approx(4.0)
    assert simulate_orca(config(cost=cost), [beams]).e2e.mean == pytest.approx(4.0)


def shares(report: Report) -> float:
    kv = report.kv
    return kv.token_states + kv.internal + kv.reserved + kv.external + kv.free


def test_where_the_slots_are_can_be_counted_by_hand() -> None:
    """One request of 8 + 4 tokens alone in 256 slots, for four iterations."""
    requests = [SimRequest(0.0, 8, 4)]
    kv = simulate_orca(config(reserve="max"), requests).kv
    stored = (8 + 9 + 10 + 11) / 4
    assert kv.token_states == pytest.approx(stored / 256)
    assert kv.reserved == pytest.approx((12 - stored) / 256)
    assert kv.internal == pytest.approx((64 - 12) / 256)
    assert (kv.external, kv.free) == (0.0, pytest.approx((256 - 64) / 256))
    exact = simulate_orca(config(reserve="oracle"), requests).kv
    assert exact.internal == 0.0
    assert exact.token_states == kv.token_states
    assert simulate_static(config(), requests).kv == kv


@pytest.fixture(scope="module")
def overloaded() -> dict[str, Report]:
    """The paper's OPT-13B, with far more requests than any baseline serves."""
    requests = workload.sharegpt(150, rate=20.0, seed=0)
    found = {
        reserve: simulate_orca(BaselineConfig.of_setup(SETUP, reserve=reserve), requests)
        for reserve in ("oracle", "pow2", "max")
    }
    found["static"] = simulate_static(BaselineConfig.of_setup(SETUP), requests)
    for report in found.values():
        check_all_served(report, requests)
    return found


def test_who_knows_more_serves_more(overloaded: dict[str, Report]) -> None:
    """Oracle before Pow2 before Max before static batching, as in figure 12."""
    rates = [overloaded[name].requests_per_second for name in ("oracle", "pow2", "max", "static")]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 4


def test_orca_max_serves_seven_at_once() -> None:
    """The paper's figure 13: 7.00 requests on average, for there is room for no more."""
    requests = workload.sharegpt(150, rate=20.0, seed=0)
    setup = BaselineConfig.of_setup(SETUP, reserve="max", stop_after_seconds=60.0)
    report = simulate_orca(setup, requests)
    assert report.num_unfinished > 50  # so nobody was without a successor
    assert 6.9 < report.mean_batched_requests <= 7.0


def test_waste_is_of_the_kind_that_it_must_be(overloaded: dict[str, Report]) -> None:
    """Max wastes most by reserving what is never used; Oracle nothing of that kind."""
    for report in overloaded.values():
        assert shares(report) == pytest.approx(1.0)
    assert overloaded["oracle"].kv.internal == 0.0
    assert overloaded["max"].kv.internal > 0.4
    tokens = [overloaded[name].kv.token_states for name in ("oracle", "pow2", "max")]
    assert tokens == sorted(tokens, reverse=True)


def test_what_is_longer_than_the_model_allows_is_refused() -> None:
    """So is what has more samples than there are places."""
    requests = [SimRequest(0.0, 60, 5), SimRequest(0.0, 4, 4, n=5), SimRequest(0.0, 4, 4)]
    for report in (
        simulate_orca(config(reserve="max"), requests),
        simulate_static(config(), requests),
    ):
        assert (report.num_refused, report.num_finished) == (2, 1)


def test_requests_out_of_order_are_an_error() -> None:
    """Time does not go back."""
    with pytest.raises(WorkloadError, match="by arrival"):
        simulate_orca(config(), [SimRequest(2.0, 1, 9), SimRequest(1.0, 1, 1)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reserve": "half"}, "reserve must be one of oracle, pow2, max, got half"),
        ({"num_slots": 10}, r"num_slots must be at least max_len \(64\), got 10"),
        ({"max_len": 1}, "max_len must be at least 2"),
        ({"max_batch": 0}, "max_batch must be at least 1"),
        ({"beam_copy_share": 1.5}, "beam_copy_share must be from 0 to 1, got 1.5"),
        ({"copy_block_size": 0}, "copy_block_size must be at least 1, got 0"),
        ({"sample_seconds": 0.0}, "sample_seconds must be above 0"),
    ],
)
def test_a_configuration_out_of_bounds_is_an_error(
    changes: dict[str, object], message: str
) -> None:
    """The message names the field and the bound."""
    with pytest.raises(ValueError, match=message):
        config(**changes)
