"""Distributions, in full and in bounded memory."""

from __future__ import annotations

import json
import math
import random

import pytest

from scheduler_svc.simulator import KvUse, RequestTable, Spread, simulate, workload
from scheduler_svc.simulator.report import Sketch
from tests.unit.simulator.support import one_second_steps


def test_a_spread_is_of_what_is_there() -> None:
    """What is not a number did not happen."""
    values = [*range(1, 101), math.nan]
    spread = Spread.of(values)
    assert (spread.mean, spread.p50, spread.p90, spread.p99, spread.max) == (50.5, 51, 91, 100, 100)
    assert Spread.of([math.nan]) == Spread()


def test_a_sketch_is_within_a_hundredth() -> None:
    """Its quantiles against the sorted values', over five orders of magnitude."""
    draw = random.Random(0)
    values = [draw.lognormvariate(-4, 2) for _ in range(20_000)]
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    values.sort()
    for share in (0.1, 0.5, 0.9, 0.99):
        expected = values[math.ceil(share * len(values)) - 1]
        assert sketch.quantile(share) == pytest.approx(expected, rel=0.011)
    spread = sketch.spread()
    assert spread.mean == pytest.approx(sum(values) / len(values))
    assert spread.max == values[-1]


def test_counting_a_value_often_is_adding_it_often() -> None:
    """A thousand equal gaps at once."""
    once, often = Sketch(), Sketch()
    once.add(0.02, 1000)
    once.add(1.0)
    for _ in range(1000):
        often.add(0.02)
    often.add(1.0)
    assert once.count == often.count == 1001
    assert once.quantile(0.5) == often.quantile(0.5) == pytest.approx(0.02, rel=0.01)
    assert once.spread().mean == pytest.approx(often.spread().mean)


def test_an_empty_sketch_has_no_quantile() -> None:
    """Nothing was measured: 0."""
    assert Sketch().spread() == Spread()


def test_the_share_of_allocated_leaves_out_what_is_not() -> None:
    """60 of 80 allocated slots hold a token."""
    use = KvUse(token_states=0.6, internal=0.1, reserved=0.1, external=0.2, free=0.0)
    assert use.of_allocated == pytest.approx(0.75)
    assert KvUse().of_allocated == 0.0


def test_a_table_names_tenants_once() -> None:
    """Rows point to them."""
    table = RequestTable()
    for tenant in ("a", "b", "a"):
        table.add(0.0, 1, 1, tenant)
    assert table.tenants == ["a", "b"]
    assert list(table.tenant) == [0, 1, 0]


def test_a_report_is_json() -> None:
    """All figures, and none of the tables; the machine's own time on request."""
    report = simulate(one_second_steps(), workload.alpaca(3, rate=1.0, seed=0, max_len=200))
    figures = json.loads(json.dumps(report.as_dict()))
    assert figures["num_finished"] == 3
    assert figures["kv"].keys() >= {"token_states", "internal", "reserved", "external", "free"}
    assert figures["ttft"]["p50"] > 0
    assert "requests" not in figures and "timeline" not in figures
    assert "wall_seconds" in figures and "wall_seconds" not in report.as_dict(wall=False)
