"""Rounds of the simulator against reality: medians, ratios, how far real rounds are apart."""

from __future__ import annotations

import pytest

from tests.bench.sim_vs_real_table import ASIDE, MEASURES, Pair, Side, rows_of, table


def pair(real: float, simulated: float, preemptions: float = 0.0) -> Pair:
    """All measures alike, in one round."""

    def side(value: float) -> Side:
        measures = dict.fromkeys((*MEASURES, *ASIDE), value)
        return Side(measures | {"preemptions": preemptions}, [value], [value])

    return Pair("W1", side(real), side(simulated))


def test_a_ratio_is_that_of_medians() -> None:
    """One slow round of three moves neither; how far real rounds are apart stands beside it."""
    rows = {row.measure: row for row in rows_of([pair(1.0, 1.1), pair(2.0, 1.2), pair(1.1, 1.0)])}
    row = rows["TTFT p50"]
    assert (row.real, row.simulated, row.apart) == (1.1, 1.1, 2.0)
    assert row.ratio == pytest.approx(1.0)


def test_what_did_not_happen_has_no_ratio() -> None:
    lines = table([pair(1.0, 1.1), pair(1.0, 1.1)])
    assert "| W1 | preemptions | 0 | 0 |  |  |" in lines
    assert "| W1 | ITL p99 | 1000 ms | 1100 ms | 1.10 | up to 1.00 |" in lines


def test_rounds_of_an_earlier_run_count_as_well() -> None:
    """What was written is read, but for the distributions, which are not in it."""
    before = pair(1.5, 1.25, preemptions=7)
    again = Pair.from_json(before.to_json())
    assert again.real.measures == before.real.measures
    assert again.simulated.measures == before.simulated.measures
    assert again.real.ttft == []
