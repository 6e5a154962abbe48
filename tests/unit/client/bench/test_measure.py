from __future__ import annotations

import math

import pytest
from octavo_client.bench.measure import Record, Slo, percentile, summarize, token_gaps
from octavo_client.bench.workload import Request


def _record(sent: float, deltas: list[tuple[float, int]], *, out: int, end: float) -> Record:
    record = Record(Request("r", (1, 2, 3, 4), out), sent_at=sent, ended_at=end)
    for now, count in deltas:
        record.add(0, now, count)
    return record


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 15.0), (25, 20.0), (40, 29.0), (50, 35.0), (99, 49.6), (100, 50)]
)
def test_percentiles_match_a_known_answer(percent: float, expected: float) -> None:
    """Linear interpolation between closest ranks, checked by hand on 15 20 35 40 50."""
    assert percentile([40, 15, 50, 35, 20], percent) == pytest.approx(expected)


def test_percentile_of_one_and_of_none() -> None:
    """One value is every percentile; of none there is no percentile."""
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)


def test_a_gap_spreads_over_the_tokens_of_its_delta() -> None:
    """K tokens after a gap g are k gaps of g/k; the first delta has none."""
    assert token_gaps([(1.0, 3), (1.4, 1), (2.0, 2)]) == pytest.approx([0.4, 0.3, 0.3])
    assert token_gaps([(1.0, 5)]) == []


def test_times_of_one_request() -> None:
    """TTFT counts from sending to the first token, e2e to the end."""
    record = _record(2.0, [(2.5, 1), (2.7, 1)], out=2, end=3.0)
    assert record.ttft == pytest.approx(0.5)
    assert record.e2e == pytest.approx(1.0)
    assert _record(2.0, [], out=2, end=3.0).ttft == math.inf


def test_summary_matches_a_known_answer() -> None:
    """Two requests by hand: rates over the whole span, normalized latency, goodput."""
    records = [
        _record(0.0, [(1.0, 1), (2.0, 1)], out=2, end=2.0),  # TTFT 1, mean ITL 1
        _record(1.0, [(1.5, 1), (1.7, 1), (1.9, 2)], out=4, end=5.0),  # TTFT 0.5, ITL about 0.13
    ]
    summary = summarize(records, Slo(ttft=0.8, itl=0.2))
    assert summary.duration == pytest.approx(5.0)
    assert summary.output_tokens_per_second == pytest.approx(6 / 5)
    assert summary.total_tokens_per_second == pytest.approx(14 / 5)
    assert summary.goodput == pytest.approx(1 / 5)
    assert summary.slo_share == pytest.approx(0.5)
    assert summary.ttft is not None
    assert summary.ttft.p50 == pytest.approx(0.75)
    assert summary.normalized is not None
    assert summary.normalized.mean == pytest.approx((2 / 2 + 4 / 4) / 2)
    assert summary.itl is not None
    assert summary.itl.max == pytest.approx(1.0)
    assert summary.itl.mean == pytest.approx((1.0 + 0.2 + 0.1 + 0.1) / 4)


def test_failures_and_wrong_lengths_count_apart() -> None:
    """A request of the wrong length is neither whole nor failed, and adds no tokens."""
    failed = _record(0.0, [(0.5, 1)], out=2, end=1.0)
    failed.error = "Overloaded: full"
    short = _record(0.0, [(0.5, 1)], out=2, end=1.0)
    whole = _record(0.0, [(0.5, 2)], out=2, end=1.0)
    summary = summarize([failed, short, whole], Slo(10, 10))
    assert (summary.num_whole, summary.num_failed, summary.num_wrong_length) == (1, 1, 1)
    assert summary.num_output_tokens == 2


def test_the_servers_own_count_decides_the_length() -> None:
    """Chunks may hide tokens; the server's usage is what is checked."""
    record = _record(0.0, [(0.5, 1)], out=2, end=1.0)
    assert not record.is_whole
    record.num_output_tokens = 2
    assert record.is_whole


def test_nothing_whole_gives_no_distributions() -> None:
    """A run that failed entirely still has a summary."""
    failed = _record(0.0, [], out=2, end=1.0)
    failed.error = "x"
    summary = summarize([failed], Slo(1, 1))
    assert summary.ttft is None
    assert summary.output_tokens_per_second == 0.0
