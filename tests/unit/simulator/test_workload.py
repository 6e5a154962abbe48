"""Drawn lengths have the published means; equal prefixes are equal tokens."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from scheduler_svc.simulator import SimRequest, WorkloadError, workload
from scheduler_svc.simulator.workload import prompt_tokens


def means(requests: list[SimRequest]) -> tuple[float, float]:
    return (
        statistics.fmean(r.num_prompt for r in requests),
        statistics.fmean(r.num_output for r in requests),
    )


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_sharegpt_has_the_papers_means(sigma: float) -> None:
    """161.31 in and 337.99 out, after too long ones were dropped (figure 11)."""
    drawn = workload.sharegpt(20_000, rate=1.0, seed=5, sigma=sigma)
    assert means(drawn) == pytest.approx((161.31, 337.99), rel=0.03)
    assert max(r.num_prompt + r.num_output for r in drawn) < 2048


def test_alpaca_has_the_papers_means() -> None:
    """19.31 in and 58.45 out (figure 11)."""
    drawn = workload.alpaca(20_000, rate=1.0, seed=5)
    assert means(drawn) == pytest.approx((19.31, 58.45), rel=0.03)


def test_arrivals_come_at_the_rate() -> None:
    """A Poisson process: mean and deviation of the gaps are one over the rate."""
    times = [r.arrival for r in workload.alpaca(20_000, rate=4.0, seed=1)]
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.05)


def test_a_seed_gives_one_workload() -> None:
    """The same again, and another with another seed."""
    first, again = (workload.sharegpt(50, rate=1.0, seed=1) for _ in range(2))
    assert first == again != workload.sharegpt(50, rate=1.0, seed=2)


@pytest.mark.parametrize(("shots", "length"), [(1, 80), (5, 341)])
def test_translations_share_their_prefix(shots: int, length: int) -> None:
    """The paper's 80 tokens of one example, or 341 of five."""
    first, second = workload.wmt(2, rate=1.0, seed=0, shots=shots)
    a, b = prompt_tokens(first, 0), prompt_tokens(second, 1)
    assert a[:length] == b[:length]
    assert a[length] != b[length]


def test_chat_prompts_are_cut() -> None:
    """Most conversations are longer than 1,024 tokens, and no output is."""
    drawn = workload.chat(1000, rate=1.0, seed=0)
    assert statistics.median(r.num_prompt for r in drawn) == 1024
    assert max(r.num_prompt for r in drawn) == 1024
    assert max(r.num_output for r in drawn) == 1024


def test_a_prompt_has_its_length() -> None:
    """Prefix ids that say more than the prompt are cut."""
    for num_prompt in (1, 511, 512, 513, 2000):
        request = SimRequest(0.0, num_prompt, 1, prefix_ids=(4, 7), prefix_tokens=512)
        assert len(prompt_tokens(request, 3)) == num_prompt


def test_prompts_share_exactly_their_leading_ids() -> None:
    """What comes after another id is other tokens, from its first one on."""
    first = SimRequest(0.0, 1600, 1, prefix_ids=(1, 2, 3), prefix_tokens=512)
    second = SimRequest(0.0, 1600, 1, prefix_ids=(1, 2, 9), prefix_tokens=512)
    a, b = prompt_tokens(first, 0), prompt_tokens(second, 1)
    assert a[:1024] == b[:1024]
    assert a[1024] != b[1024]
    assert a[1536] != b[1536]


def test_lengths_are_capped_and_long_requests_dropped() -> None:
    """Cuts come first."""
    requests = [SimRequest(0.0, 100, 50), SimRequest(0.0, 10, 5)]
    assert [r.num_prompt for r in workload.capped(requests, max_prompt=60)] == [60, 10]
    assert [r.num_output for r in workload.capped(requests, max_output=7)] == [7, 5]
    assert len(workload.capped(requests, max_len=150)) == 1


def test_rates_are_scaled() -> None:
    """Twice as fast is half the time."""
    assert workload.scale_rate([SimRequest(3.0, 1, 1)], 2.0)[0].arrival == 1.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_prompt": 0}, "num_prompt must be at least 1, got 0"),
        ({"num_output": 0}, "num_output must be at least 1, got 0"),
        ({"n": 0}, "n must be at least 1, got 0"),
        ({"arrival": -1.0}, "arrival must be seconds from 0"),
        ({"beam_width": 1, "n": 2}, r"beam_width must be 0, or at least n \(2\), got 1"),
        ({"prefix_ids": (1,)}, "prefix_tokens must be at least 1, got 0"),
        ({"prefix_ids": (-1,), "prefix_tokens": 1}, "prefix_ids must be from 0"),
    ],
)
def test_a_request_out_of_bounds_is_an_error(values: dict[str, object], message: str) -> None:
    """The message names the field and the bound."""
    with pytest.raises(WorkloadError, match=message):
        SimRequest(**{"arrival": 0.0, "num_prompt": 1, "num_output": 1, **values})


def test_a_rate_of_nothing_is_an_error() -> None:
    """Requests that never come could not be simulated."""
    with pytest.raises(WorkloadError, match="rate must be above 0"):
        workload.alpaca(1, rate=0.0, seed=0)
