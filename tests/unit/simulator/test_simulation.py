"""The real core in simulated time: what can be counted by hand is what is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.simulator import (
    PAPER_SETUPS,
    LinearCost,
    SimRequest,
    SimulationConfig,
    WorkloadError,
    simulate,
    workload,
)
from tests.unit.simulator.support import check_all_served, check_idle, one_second_steps

Cores = dict[int, Scheduler]


def test_one_request_takes_a_step_for_every_token() -> None:
    """Ten tokens of prompt in one step, whose token is the first of five."""
    report = simulate(one_second_steps(), [SimRequest(2.0, 10, 5)])
    assert report.ttft.mean == 1.0
    assert report.e2e.mean == report.seconds == 5.0
    assert report.normalized_latency.mean == 1.0
    assert report.itl.p50 == pytest.approx(1.0, rel=0.01)
    assert report.num_steps == 5
    assert report.num_computed_tokens == 14
    assert report.output_tokens_per_second == 1.0


def test_the_next_step_is_there_before_the_wire_is_crossed() -> None:
    """With two steps in flight the wire delays the first token, and no other."""
    report = simulate(one_second_steps(wire_seconds=0.125), [SimRequest(0.0, 10, 5)])
    assert report.ttft.mean == 1.25
    assert report.e2e.mean == 5.25


def test_with_one_step_in_flight_the_wire_is_waited_for() -> None:
    """Each of five steps costs a way there and one back."""
    config = one_second_steps(wire_seconds=0.125, max_steps_in_flight=1)
    assert simulate(config, [SimRequest(0.0, 10, 5)]).e2e.mean == 5 * 1.25


def test_a_long_prompt_is_computed_in_chunks() -> None:
    """150 tokens under a budget of 64 are three steps."""
    report = simulate(one_second_steps(), [SimRequest(0.0, 150, 1)])
    assert report.ttft.mean == 3.0


def test_a_slow_executor_takes_longer() -> None:
    """By its factor."""
    report = simulate(one_second_steps(slowdowns=(3.0,)), [SimRequest(0.0, 10, 5)])
    assert report.e2e.mean == 15.0


def test_a_scheduler_process_does_one_thing_at_a_time() -> None:
    """Two executors' results come together: the second waits until the first is planned for."""
    config = one_second_steps(
        num_executors=2, router="round-robin", scheduler_seconds=0.25, max_steps_in_flight=1
    )
    report = simulate(config, [SimRequest(0.0, 10, 1), SimRequest(0.0, 10, 1)])
    assert sorted(report.requests.end) == [1.25, 1.5]


def test_batches_are_counted_by_the_time_of_their_steps() -> None:
    """The first has two steps before the others come; they share two, and one has two more."""
    requests = [SimRequest(0.0, 5, 2), SimRequest(0.0, 5, 2), SimRequest(0.0, 5, 4)]
    report = simulate(one_second_steps(), requests)
    assert report.num_steps == 6
    assert report.mean_batched_sequences == pytest.approx((1 + 1 + 2 + 2 + 1 + 1) / 6)


def test_everything_is_served_and_given_back(cores: Cores) -> None:
    """Under a load that needs preemption, with the core's invariants checked at each step."""
    requests = workload.alpaca(60, rate=2.0, seed=3, max_len=200)
    config = one_second_steps(max_num_seqs=16, num_blocks=60)
    report = simulate(config, requests)
    check_all_served(report, requests)
    check_idle(cores)
    assert report.num_recompute_preemptions > 0


@pytest.mark.parametrize("preemption", ["swap", "auto"])
def test_preemption_by_swap_loses_nothing(cores: Cores, preemption: str) -> None:
    """What goes to the host comes back."""
    requests = workload.alpaca(60, rate=2.0, seed=3, max_len=200)
    cost = LinearCost("x", {"fixed": 1.0, "per_token": 0.1, "per_moved_block": 0.001}, num_blocks=1)
    config = one_second_steps(
        cost=cost, max_num_seqs=16, num_blocks=60, num_host_blocks=60, preemption=preemption
    )
    report = simulate(config, requests)
    check_all_served(report, requests)
    check_idle(cores)
    assert report.num_swap_preemptions > 0


def test_samples_share_their_prompt(cores: Cores) -> None:
    """Four samples of a long prompt need little more than a quarter of the blocks."""
    requests = [SimRequest(float(i), 160, 8, n=4) for i in range(3)]
    report = simulate(one_second_steps(num_blocks=256, max_num_seqs=16), requests)
    check_all_served(report, requests)
    check_idle(cores)
    # 40 blocks of prompt by four, and at most two of each one's own.
    assert 0.70 < report.saved_by_sharing < 0.75


def test_samples_that_were_preempted_share_only_their_prompt(cores: Cores) -> None:
    """Their outputs differ, so that none is taken for another's in the prefix cache."""
    requests = [SimRequest(0.0, 20, 40, n=3), SimRequest(1.0, 20, 40, n=3)]
    report = simulate(one_second_steps(num_blocks=52), requests)
    check_all_served(report, requests)
    check_idle(cores)
    assert report.num_recompute_preemptions > 0
    # Nobody has more in common with a sibling than the five blocks of its prompt.
    assert report.num_computed_tokens > 2 * (20 + 3 * 39)


@pytest.mark.parametrize("width", [2, 4])
def test_beams_are_searched_to_their_length(cores: Cores, width: int) -> None:
    """A search gives its best hypothesis, and its beams share blocks."""
    requests = [
        replace(r, n=1, beam_width=width)
        for r in workload.alpaca(12, rate=0.1, seed=1, max_len=200)
    ]
    report = simulate(one_second_steps(num_blocks=512), requests)
    check_all_served(report, requests)
    check_idle(cores)
    assert report.saved_by_sharing > 0.2
    assert report.num_copied_blocks > 0


def test_more_open_steps_make_beams_share_more() -> None:
    """Beams of an open model replace one another more often, so their ancestors are younger."""
    requests = workload.with_samples(workload.alpaca(20, rate=0.01, seed=1), beam_width=4)
    saved = [
        simulate(one_second_steps(num_blocks=4096, beam_openness=x), requests).saved_by_sharing
        for x in (0.0, 0.3)
    ]
    assert saved[0] < saved[1]


def test_equal_prefixes_are_found_in_the_cache(cores: Cores) -> None:
    """The second request computes what is its own."""
    requests = [
        SimRequest(0.0, 100, 2, prefix_ids=(1, 2), prefix_tokens=40),
        SimRequest(50.0, 100, 2, prefix_ids=(1, 3), prefix_tokens=40),
        SimRequest(90.0, 100, 2, prefix_ids=(1, 3), prefix_tokens=40),
    ]
    report = simulate(one_second_steps(), requests)
    check_all_served(report, requests)
    assert report.num_prefix_hit_tokens == 40 + 80
    uncached = simulate(one_second_steps(prefix_cache=False), requests)
    assert uncached.num_computed_tokens - report.num_computed_tokens == 40 + 80


def test_a_run_is_a_function_of_its_configuration() -> None:
    """The same figures again, and the same end of every request."""
    requests = workload.with_samples(
        workload.alpaca(30, rate=1.0, seed=2, max_len=200), beam_width=2
    )
    config = one_second_steps(num_blocks=128, max_num_seqs=16, seed=7)
    first, again = simulate(config, requests), simulate(config, iter(requests))
    assert first.as_dict(wall=False) == again.as_dict(wall=False)
    assert first.requests.end == again.requests.end
    assert first.timeline == again.timeline


def test_shares_of_the_pool_add_up() -> None:
    """Every slot is somewhere at any time, and blocks are never reserved."""
    report = simulate(one_second_steps(), workload.alpaca(30, rate=1.0, seed=2, max_len=200))
    kv = report.kv
    assert kv.token_states + kv.internal + kv.reserved + kv.external + kv.free == pytest.approx(1)
    assert kv.reserved == 0
    assert kv.of_allocated > 0.5


def test_time_goes_on_between_samples_of_the_timeline() -> None:
    """One each two seconds, and the tokens only grow."""
    requests = workload.alpaca(10, rate=1.0, seed=2, max_len=200)
    report = simulate(one_second_steps(sample_seconds=2.0), requests)
    times = [sample.seconds for sample in report.timeline]
    assert times == [2.0 * (i + 1) for i in range(len(times))]
    tokens = [sample.num_output_tokens for sample in report.timeline]
    assert tokens == sorted(tokens)
    assert all(0 <= sample.block_use <= 1 for sample in report.timeline)


def test_a_simulation_can_be_stopped() -> None:
    """What has not ended is told apart."""
    requests = [SimRequest(0.0, 5, 5), SimRequest(0.0, 5, 500), SimRequest(99.0, 5, 5)]
    report = simulate(one_second_steps(num_blocks=200, stop_after_seconds=20.0), requests)
    assert (report.num_requests, report.num_finished, report.num_unfinished) == (2, 1, 1)


def test_what_never_fits_is_refused() -> None:
    """It would wait for ever."""
    report = simulate(one_second_steps(num_blocks=8), [SimRequest(0.0, 64, 64)])
    assert (report.num_refused, report.num_finished) == (1, 0)


def test_a_full_queue_refuses() -> None:
    """One runs, one waits, and the third is told at once."""
    config = one_second_steps(max_num_seqs=1, max_queue=1)
    report = simulate(config, [SimRequest(0.0, 4, 9) for _ in range(3)])
    assert (report.num_refused, report.num_finished) == (1, 2)


def test_requests_out_of_order_are_an_error() -> None:
    """Time does not go back."""
    with pytest.raises(WorkloadError, match="must come by arrival, got 1 after 2"):
        simulate(one_second_steps(), [SimRequest(2.0, 1, 1), SimRequest(1.0, 1, 1)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"num_executors": 0}, "num_executors must be at least 1, got 0"),
        ({"num_schedulers": 2}, "num_schedulers must be at most num_executors"),
        ({"router": "best"}, "router must be one of placement, round-robin"),
        ({"wire_seconds": -1.0}, "wire_seconds must be at least 0"),
        ({"beam_openness": 2.0}, "beam_openness must be from 0 to 1"),
        ({"slowdowns": (0.0,)}, "slowdowns must be above 0"),
        ({"sample_seconds": 0.0}, "sample_seconds must be above 0"),
        ({"preemption": "never"}, "preemption must be recompute, swap or auto"),
    ],
)
def test_a_configuration_out_of_bounds_is_an_error(
    changes: dict[str, object], message: str
) -> None:
    """The message names the field and the bound."""
    with pytest.raises(ValueError, match=message):
        one_second_steps(**changes)


def test_the_papers_setup_serves_sharegpt() -> None:
    """OPT-13B on an A100 serves one request a second well within its capacity."""
    requests = workload.sharegpt(60, rate=1.0, seed=0)
    report = simulate(SimulationConfig.of_setup(PAPER_SETUPS["opt-13b"]), requests)
    check_all_served(report, requests)
    # A token takes at least as long as reading the weights: 16.5 ms.
    assert 0.0165 < report.normalized_latency.p50 < 0.1
    assert report.itl.p50 > 0.0165
