"""Whatever is asked for, under whatever policy, is served exactly, and everything is given back."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.simulator import (
    BaselineConfig,
    Failures,
    LinearCost,
    SimRequest,
    simulate,
    simulate_orca,
    simulate_static,
)
from scheduler_svc.simulator.routing import ROUTERS
from tests.unit.simulator.support import check_all_served, check_idle, one_second_steps


@st.composite
def workloads(draw: st.DrawFn) -> list[SimRequest]:
    """Up to ten requests, of one sample, of several, or of a beam search."""
    now, requests = 0.0, []
    for _ in range(draw(st.integers(1, 10))):
        now += draw(st.sampled_from([0.0, 0.5, 3.0]))
        width = draw(st.integers(1, 3))
        is_beam = width > 1 and draw(st.booleans())
        requests.append(
            SimRequest(
                now,
                draw(st.integers(1, 40)),
                draw(st.integers(1, 20)),
                n=1 if is_beam else width,
                beam_width=width if is_beam else 0,
                prefix_ids=draw(st.sampled_from([(), (1,), (1, 2), (3,)])),
                prefix_tokens=8,
                tenant=draw(st.sampled_from(["a", "b"])),
                priority=draw(st.integers(0, 1)),
            )
        )
    return requests


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=workloads(),
    num_blocks=st.integers(48, 80),
    num_executors=st.integers(1, 3),
    preemption=st.sampled_from(["recompute", "swap", "auto"]),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    router=st.sampled_from(sorted(ROUTERS)),
    max_steps_in_flight=st.integers(1, 2),
    fails_at=st.none() | st.floats(0.1, 30.0),
)
def test_all_is_served_and_all_is_given_back(
    cores: dict[int, Scheduler],
    requests: list[SimRequest],
    num_blocks: int,
    num_executors: int,
    preemption: str,
    policy: str,
    router: str,
    max_steps_in_flight: int,
    fails_at: float | None,
) -> None:
    """The longest of them fits the smallest pool alone; an executor dies at most once."""
    cores.clear()
    config = one_second_steps(
        num_blocks=num_blocks,
        num_host_blocks=num_blocks,
        num_executors=num_executors,
        preemption=preemption,
        policy=policy,
        router=router,
        max_steps_in_flight=max_steps_in_flight,
        failures=None if fails_at is None else Failures(at=((fails_at, 0),)),
    )
    report = simulate(config, requests)
    check_all_served(report, requests)
    check_idle(cores)
    assert all(a <= b for a, b in zip(report.requests.arrival, report.requests.end, strict=True))


@settings(max_examples=60, deadline=None)
@given(workloads(), st.sampled_from(["oracle", "pow2", "max"]))
def test_the_baselines_serve_all(requests: list[SimRequest], reserve: str) -> None:
    """Three places of the longest length are room for each of them alone."""
    cost = LinearCost("one second", {"fixed": 1.0}, num_blocks=1)
    config = BaselineConfig(cost, 192 + 5, max_len=64, reserve=reserve)
    for report in (simulate_orca(config, requests), simulate_static(config, requests)):
        check_all_served(report, requests)
        shares = report.kv
        assert min(shares.token_states, shares.internal, shares.reserved, shares.external) >= 0
