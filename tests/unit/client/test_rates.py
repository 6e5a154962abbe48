"""Tests of octavo_client._rates."""

from __future__ import annotations

import pytest
from octavo.v1 import admin_pb2
from octavo_client import Snapshot
from octavo_client._admin import parse_snapshot
from octavo_client._rates import RateWindow


def snapshot(seconds: float, *executors: dict[str, int]) -> Snapshot:
    states = [admin_pb2.ExecutorState(counters=each) for each in executors]
    return parse_snapshot(admin_pb2.Snapshot(time_unix_ns=round(seconds * 1e9), executors=states))


def test_rates_are_what_counters_grew_by_per_second() -> None:
    """Over all executors; the first snapshot has none yet."""
    window = RateWindow(5)
    before = {"num_generated_tokens": 100, "num_swap_preemptions": 1}
    after = {"num_generated_tokens": 160, "num_swap_preemptions": 2}
    assert window.add(snapshot(10, before, before)) is None
    rates = window.add(snapshot(12, after | {"num_recompute_preemptions": 2}, after))
    assert rates is not None
    assert rates.generated_tokens == pytest.approx(60)
    assert rates.preemptions == pytest.approx(2)
    assert rates.prefix_hit_rate is None


def test_old_snapshots_count_no_more() -> None:
    """After the window's seconds without a token the rate is 0."""
    window = RateWindow(5)
    rates = None
    for second in range(20):
        rates = window.add(snapshot(second, {"num_generated_tokens": min(second, 10) * 100}))
    assert rates is not None
    assert rates.generated_tokens == 0


def test_counters_that_fell_begin_anew() -> None:
    """A scheduler that was restarted, or another replica, makes no negative rate."""
    window = RateWindow(5)
    window.add(snapshot(1, {"num_generated_tokens": 1000}))
    assert window.add(snapshot(2, {"num_generated_tokens": 5})) is None
    rates = window.add(snapshot(3, {"num_generated_tokens": 12}))
    assert rates is not None
    assert rates.generated_tokens == pytest.approx(7)


def test_the_hit_rate_is_of_these_seconds_or_of_all() -> None:
    """Prompts that came now decide; while none come, all that ever came."""
    window = RateWindow(1)
    past = {"num_prefix_query_tokens": 100, "num_prefix_hit_tokens": 10}
    now = {"num_prefix_query_tokens": 200, "num_prefix_hit_tokens": 100}
    window.add(snapshot(1, past))
    rates = window.add(snapshot(2, now))
    assert rates is not None
    assert rates.prefix_hit_rate == pytest.approx(0.9)
    window.add(snapshot(4, now))
    rates = window.add(snapshot(6, now))
    assert rates is not None
    assert rates.prefix_hit_rate == pytest.approx(0.5)
