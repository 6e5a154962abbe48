"""Many executors: who gets what, and what goes on when one is gone."""

from __future__ import annotations

import pytest

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.simulator import Autoscale, Failures, SimRequest, simulate, workload
from scheduler_svc.simulator.routing import ROUTERS
from tests.unit.simulator.support import check_all_served, check_idle, one_second_steps

Cores = dict[int, Scheduler]


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_every_router_serves_everything(cores: Cores, router: str) -> None:
    """On three executors, all of which get something."""
    requests = workload.alpaca(60, rate=2.0, seed=4, max_len=200)
    report = simulate(one_second_steps(num_executors=3, router=router), requests)
    check_all_served(report, requests)
    check_idle(cores)
    assert all(core.state.counters.num_finished > 5 for core in cores.values())


def test_round_robin_gives_each_the_same(cores: Cores) -> None:
    """Whatever they have to do."""
    simulate(
        one_second_steps(num_executors=3, router="round-robin"),
        [SimRequest(float(i), 4, 1 + 9 * (i % 3 == 0)) for i in range(30)],
    )
    assert [cores[i].state.counters.num_finished for i in range(3)] == [10, 10, 10]


def two_conversations() -> list[SimRequest]:
    """Twelve turns of two long conversations, one after the other."""
    return [SimRequest(30.0 * i, 120, 2, prefix_ids=(i % 2,), prefix_tokens=100) for i in range(12)]


def test_prefix_routing_finds_what_round_robin_misses() -> None:
    """Each conversation stays with one executor, so each prefix is computed once."""
    hits = {
        router: simulate(
            one_second_steps(num_executors=3, router=router), two_conversations()
        ).num_prefix_hit_tokens
        for router in ("placement", "longest-prefix", "round-robin")
    }
    assert hits["placement"] == hits["longest-prefix"] == 10 * 100
    assert hits["round-robin"] < 8 * 100


def test_schedulers_take_turns(cores: Cores) -> None:
    """Each has its own executors; requests come to them one after the other."""
    requests = [SimRequest(float(i), 4, 2) for i in range(12)]
    config = one_second_steps(num_executors=4, num_schedulers=2)
    report = simulate(config, requests)
    check_all_served(report, requests)
    finished = {i: core.state.counters.num_finished for i, core in cores.items()}
    assert sum(n for i, n in finished.items() if i % 2 == 0) == 6


def test_a_death_moves_requests_and_loses_none(cores: Cores) -> None:
    """They go on on the other executor, with all their tokens."""
    requests = [SimRequest(0.25 * i, 10, 30) for i in range(8)]
    config = one_second_steps(num_executors=2, failures=Failures(at=((9.5, 0),)))
    report = simulate(config, requests)
    check_all_served(report, requests)
    check_idle(cores)
    assert report.num_deaths == 1
    assert report.num_moved == 4
    assert report.mean_executors < 2
    # Tokens that were told are not drawn again: the moved ones are computed as a prompt.
    assert report.itl.max > 1.0


def test_requests_of_the_only_executor_wait_for_it(cores: Cores) -> None:
    """It is back after a minute, and they go on; so do those that came meanwhile."""
    requests = [SimRequest(0.0, 10, 20), SimRequest(0.0, 10, 20), SimRequest(30.0, 10, 20)]
    config = one_second_steps(failures=Failures(at=((9.5, 0),), down_seconds=60.0))
    report = simulate(config, requests)
    check_all_served(report, requests)
    check_idle(cores)
    assert report.num_moved == 0
    assert min(report.requests.end) > 69.5


def test_until_a_death_is_noticed_requests_still_go_there(cores: Cores) -> None:
    """And then they move on with the others."""
    requests = [SimRequest(0.0, 10, 20), SimRequest(0.0, 10, 20), SimRequest(8.0, 10, 2)]
    failures = Failures(at=((5.5, 0),), detect_seconds=10.0, down_seconds=100.0)
    config = one_second_steps(num_executors=2, router="round-robin", failures=failures)
    report = simulate(config, requests)
    check_all_served(report, requests)
    assert report.num_moved == 2
    assert report.requests.end[2] > 15.5


def test_random_failures_lose_nothing(cores: Cores) -> None:
    """Ninety an hour for each of four executors; and the same ones for the same seed."""
    requests = workload.alpaca(60, rate=0.5, seed=8, max_len=200)
    config = one_second_steps(
        num_executors=4, failures=Failures(per_executor_hour=90.0, down_seconds=20.0), seed=1
    )
    report = simulate(config, requests)
    assert report.num_deaths > 3
    # A request that executors died under twice while it was alone is given up, by rule.
    assert report.num_finished + report.num_failed == len(requests)
    assert report.num_failed <= 2
    check_idle(cores)
    again = simulate(config, requests)
    assert again.as_dict(wall=False) == report.as_dict(wall=False)
    other = simulate(config.with_changes(seed=2), requests)
    assert other.as_dict(wall=False) != report.as_dict(wall=False)


def test_a_queue_lets_executors_be_added_and_quiet_takes_them_away(cores: Cores) -> None:
    """A burst, and then long nothing but a request a minute."""
    burst = [SimRequest(0.5 * i, 10, 20) for i in range(100)]
    quiet = [SimRequest(400.0 + 60.0 * i, 10, 20) for i in range(20)]
    scale = Autoscale(1, 4, queue_wait_seconds=5.0, start_seconds=10.0, calm_seconds=120.0)
    report = simulate(one_second_steps(autoscale=scale, sample_seconds=20.0), [*burst, *quiet])
    check_all_served(report, [*burst, *quiet])
    check_idle(cores)
    assert report.max_executors == 4
    assert report.timeline[-1].num_executors == 1


def test_an_executor_that_is_given_up_hands_its_requests_on(cores: Cores) -> None:
    """What runs on it goes on on those that stay."""
    busy = [SimRequest(0.5 * i, 10, 20) for i in range(100)]
    tail = [SimRequest(150.0 + 4.0 * i, 10, 60) for i in range(60)]
    scale = Autoscale(1, 4, queue_wait_seconds=5.0, start_seconds=10.0, calm_seconds=60.0)
    config = one_second_steps(autoscale=scale, max_num_seqs=16, num_blocks=512)
    report = simulate(config, [*busy, *tail])
    check_all_served(report, [*busy, *tail])
    check_idle(cores)


def test_dead_executors_count_among_those_that_there_are(cores: Cores) -> None:
    """They come back, and then there must not be more than the bound."""
    requests = [SimRequest(0.5 * i, 10, 20) for i in range(200)]
    scale = Autoscale(1, 3, queue_wait_seconds=1.0, start_seconds=0.0)
    failures = Failures(at=((12.0, 0), (40.0, 0)), down_seconds=60.0)
    report = simulate(one_second_steps(autoscale=scale, failures=failures), requests)
    check_all_served(report, requests)
    check_idle(cores)
    assert report.num_deaths == 1  # at the second time it was dead already
    assert report.max_executors == 3


@pytest.mark.parametrize(
    ("present", "wait", "use", "expected"),
    [
        (2, 0.0, 0.8, 2),  # on target
        (2, 0.0, 0.85, 2),  # within the tolerance
        (2, 2.0, 0.1, 4),  # twice the wait
        (2, 100.0, 0.1, 6),  # no more than 4 at once
        (10, 100.0, 0.1, 16),  # nor than there may be
        (8, 0.0, 0.2, 2),  # a quarter of the use
        (8, 0.0, 0.0, 1),
    ],
)
def test_the_autoscaler_follows_its_ratio(
    present: int, wait: float, use: float, expected: int
) -> None:
    """As Kubernetes' horizontal autoscaler does, within bounds."""
    scale = Autoscale(1, 16, queue_wait_seconds=1.0, block_use=0.8)
    assert scale.wanted(present, wait, use) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Failures(per_executor_hour=-1.0), "per_executor_hour must be at least 0"),
        (lambda: Failures(detect_seconds=70.0), "detect_seconds must be at most down_seconds"),
        (lambda: Failures(at=((-1.0, 0),)), "at must hold seconds and indices from 0"),
        (lambda: Autoscale(0, 2), "min_executors must be from 1 to max_executors"),
        (lambda: Autoscale(1, 2, block_use=0.0), "block_use must be above 0"),
        (lambda: Autoscale(1, 2, calm_seconds=-1.0), "calm_seconds must be at least 0"),
        (lambda: one_second_steps(failures=Failures(at=((1.0, 3),))), "index must be below"),
    ],
)
def test_what_is_out_of_bounds_is_an_error(make: object, message: str) -> None:
    """The message names the field and the bound."""
    with pytest.raises(ValueError, match=message):
        make()
