"""Short ways to say what a test of the simulator needs."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.simulator import LinearCost, Report, SimRequest, SimulationConfig


def one_second_steps(**changes: object) -> SimulationConfig:
    """Every step takes a second, whatever is in it; blocks of 4 tokens."""
    values = {
        "cost": LinearCost("one second", {"fixed": 1.0}, num_blocks=64),
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "watermark": 0.0,
    }
    return SimulationConfig(**{**values, **changes})


def num_tokens_asked(requests: Sequence[SimRequest]) -> int:
    """Tokens that all requests generate together."""
    return sum(r.n * r.num_output for r in requests)


def check_all_served(report: Report, requests: Sequence[SimRequest]) -> None:
    """Every request ended, with exactly the tokens that it asked for."""
    assert report.num_requests == len(requests)
    assert report.num_finished == len(requests)
    assert report.num_failed == report.num_refused == report.num_unfinished == 0
    assert report.num_output_tokens == num_tokens_asked(requests)


def check_idle(cores: dict[int, Scheduler]) -> None:
    """All blocks of all pools are free or cached, and nobody is left."""
    assert cores
    for core in cores.values():
        state = core.state
        assert not core.has_requests
        assert state.blocks.pool.num_referenced == 0
        assert state.blocks.num_fenced == 0
        host = state.blocks.host_pool
        assert host is None or host.num_available == host.num_total
