"""Percentiles of the last ten seconds."""

from __future__ import annotations

import random

import pytest

from scheduler_svc.observation.latency import LatencyWindow


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_nothing_seen_is_zero(clock: Clock) -> None:
    assert LatencyWindow(clock).percentiles(50, 99) == (0, [0.0, 0.0])


@pytest.mark.parametrize("seconds", [0.00012, 0.004, 0.35, 2.0, 77.0])
def test_one_latency_is_all_percentiles_within_five_percent(clock: Clock, seconds: float) -> None:
    window = LatencyWindow(clock)
    window.add(seconds)
    count, found = window.percentiles(1, 50, 100)
    assert count == 1
    assert found == pytest.approx([seconds] * 3, rel=0.055)


def test_percentiles_are_those_of_the_sorted_list(clock: Clock) -> None:
    rng = random.Random(1)
    values = [rng.lognormvariate(-3, 1.2) for _ in range(5000)]
    window = LatencyWindow(clock)
    for value in values:
        clock.now = 1000 + 9 * rng.random()
        window.add(value)
    clock.now = 1009.5
    values.sort()
    count, found = window.percentiles(10, 50, 90, 99)
    assert count == len(values)
    exact = [values[int(len(values) * percent / 100)] for percent in (10, 50, 90, 99)]
    assert found == pytest.approx(exact, rel=0.06)


def test_counts_weigh(clock: Clock) -> None:
    window = LatencyWindow(clock)
    window.add(0.01, 98)
    window.add(1.0, 2)
    count, found = window.percentiles(50, 98, 99)
    assert count == 100
    assert found == pytest.approx([0.01, 0.01, 1.0], rel=0.055)


def test_what_is_older_than_ten_seconds_is_forgotten(clock: Clock) -> None:
    window = LatencyWindow(clock)
    window.add(5.0)
    clock.now += 9
    window.add(0.1)
    assert window.percentiles(100)[0] == 2
    clock.now += 2
    count, (longest,) = window.percentiles(100)
    assert (count, longest) == (1, pytest.approx(0.1, rel=0.055))
    clock.now += 3600
    assert window.percentiles(50) == (0, [0.0])


def test_extremes_stay_in_the_last_buckets(clock: Clock) -> None:
    window = LatencyWindow(clock)
    window.add(0.0)
    window.add(1e9)
    count, (least, most) = window.percentiles(1, 100)
    assert count == 2
    assert least < 2e-4 and 100 < most < 1000
