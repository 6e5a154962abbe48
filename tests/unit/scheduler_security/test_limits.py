"""Tests of scheduler_svc.security.limits: rates hold over any span, refusals cost nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.errors import TenantLimit
from scheduler_svc.security.keys import TenantLimits
from scheduler_svc.security.limits import TenantLimiter, Ticket, TokenBucket

CAPACITIES = st.integers(1, 10**9)
# (seconds since the last attempt, amount as a share of the capacity)
ATTEMPTS = st.lists(
    st.tuples(st.floats(0, 200), st.floats(0.0, 2.5)), min_size=1, max_size=40
)  # fmt: skip


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> TenantLimiter:
    return TenantLimiter(clock)


@given(CAPACITIES, ATTEMPTS)
def test_no_span_of_time_has_more_than_its_share(
    capacity: int, attempts: list[tuple[float, float]]
) -> None:
    """Between any two moments: a full bucket, the inflow of the span, one amount too large."""
    bucket, now = TokenBucket(capacity, 0.0), 0.0
    taken: list[tuple[float, int]] = []
    for gap, share in attempts:
        now += gap
        amount = max(1, int(share * capacity))
        if bucket.wait(amount, now) == 0.0:
            bucket.take(amount, now)
            taken.append((now, amount))
    for first, (begin, _) in enumerate(taken):
        total, excess = 0, 0
        for end, amount in taken[first:]:
            total += amount
            excess = max(excess, amount - capacity)
            allowed = capacity + (end - begin) * capacity / 60 + max(excess, 0)
            assert total <= allowed * (1 + 1e-6) + 1e-3


@given(CAPACITIES, ATTEMPTS)
def test_the_wait_that_is_told_is_exact(capacity: int, attempts: list[tuple[float, float]]) -> None:
    """After it the amount may be taken, well before it may not, and asking changes nothing."""
    bucket, now = TokenBucket(capacity, 0.0), 0.0
    for gap, share in attempts:
        now += gap
        amount = max(1, int(share * capacity))
        seconds = bucket.wait(amount, now)
        assert bucket.wait(amount, now) == seconds
        if seconds > 1.0:
            assert bucket.wait(amount, now + seconds / 2) > 0
        now += seconds
        assert bucket.wait(amount, now) == pytest.approx(0.0, abs=1e-5)
        bucket.take(amount, now)


@given(CAPACITIES, st.lists(st.integers(1, 1000), max_size=20))
def test_what_is_given_back_was_never_taken(capacity: int, amounts: list[int]) -> None:
    """The bucket is as full as before, and never fuller than full."""
    bucket = TokenBucket(capacity, 0.0)
    for amount in amounts:
        bucket.take(amount, 0.0)
    for amount in amounts:
        bucket.give_back(amount, 0.0)
    assert bucket.is_full(0.0)
    bucket.give_back(capacity, 0.0)
    bucket.take(capacity, 0.0)
    assert bucket.wait(1, 0.0) == pytest.approx(60 / capacity)


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    """Time is only ever counted once."""
    bucket = TokenBucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.wait(1, 50.0) == 1.0
    assert bucket.wait(1, 100.5) == 0.5
    assert bucket.wait(1, 101.0) == 0.0


def test_a_smaller_limit_counts_what_was_used() -> None:
    """Changing the file does not give an allowance anew."""
    bucket = TokenBucket(100, 0.0)
    bucket.take(40, 0.0)
    bucket.resize(50, 0.0)
    assert bucket.wait(10, 0.0) == 0.0
    assert bucket.wait(11, 0.0) > 0
    bucket.resize(100, 0.0)
    assert bucket.wait(60, 0.0) == 0.0
    assert bucket.wait(61, 0.0) > 0


def enter(limiter: TenantLimiter, tenant: str = "t", **limits: int) -> Ticket:
    return limiter.enter(tenant, TenantLimits(**limits))


def test_requests_at_once_are_counted_while_they_run(limiter: TenantLimiter) -> None:
    """A place is free again however a call ends; other tenants have their own."""
    with enter(limiter, max_concurrent_requests=2) as first:
        first.accept()
        with enter(limiter, max_concurrent_requests=2):
            with pytest.raises(TenantLimit) as caught:
                enter(limiter, max_concurrent_requests=2)
            assert (caught.value.limit, caught.value.value) == ("max_concurrent_requests", 2)
            assert caught.value.retry_seconds > 0
            enter(limiter, "u", max_concurrent_requests=2)
        with pytest.raises(RuntimeError), enter(limiter, max_concurrent_requests=2):
            raise RuntimeError
        enter(limiter, max_concurrent_requests=2)


def test_requests_a_minute_come_back_steadily(limiter: TenantLimiter, clock: Clock) -> None:
    """Two at once, then one every half minute; the refusal says when."""
    for _ in range(2):
        with enter(limiter, max_requests_per_minute=2) as ticket:
            ticket.accept()
    with pytest.raises(TenantLimit, match="max_requests_per_minute of 2") as caught:
        enter(limiter, max_requests_per_minute=2)
    assert caught.value.retry_seconds == pytest.approx(30.0)
    clock.now += 30.0
    with enter(limiter, max_requests_per_minute=2) as ticket:
        ticket.accept()
    with pytest.raises(TenantLimit):
        enter(limiter, max_requests_per_minute=2)


def test_output_is_paid_when_it_is_made(limiter: TenantLimiter, clock: Clock) -> None:
    """A call that runs may owe; the next waits until that is paid and its prompt is there."""
    limits = {"max_tokens_per_minute": 60}
    with enter(limiter, **limits) as ticket:
        ticket.charge(50)
        ticket.accept()
        ticket.spend(40)
    with enter(limiter, **limits) as ticket, pytest.raises(TenantLimit) as caught:
        ticket.charge(10)
    assert caught.value.limit == "max_tokens_per_minute"
    assert caught.value.retry_seconds == pytest.approx(40.0)
    clock.now += 40.0
    with enter(limiter, **limits) as ticket:
        ticket.charge(10)


def test_a_prompt_above_the_limit_waits_for_a_full_bucket(
    limiter: TenantLimiter, clock: Clock
) -> None:
    """It is let in then, and paid for afterwards: it could never come otherwise."""
    limits = {"max_tokens_per_minute": 60}
    with enter(limiter, **limits) as ticket:
        ticket.charge(300)
        ticket.accept()
    with enter(limiter, **limits) as ticket, pytest.raises(TenantLimit) as caught:
        ticket.charge(1)
    assert caught.value.retry_seconds == pytest.approx(241.0)


def test_a_refused_call_costs_nothing(limiter: TenantLimiter) -> None:
    """Neither the one that a limit refuses, nor the one that something else refuses later."""
    limits = {"max_requests_per_minute": 1, "max_tokens_per_minute": 100}
    for _ in range(5):
        with enter(limiter, **limits) as ticket:
            ticket.charge(100)
    with enter(limiter, **limits) as ticket, pytest.raises(TenantLimit):
        ticket.charge(40)
        ticket.charge(61)
    with enter(limiter, **limits) as ticket:
        ticket.charge(100)
        ticket.accept()
    with pytest.raises(TenantLimit):
        enter(limiter, **limits)


def test_limits_may_change_while_calls_run(limiter: TenantLimiter) -> None:
    """From none to some to none; calls that began before end well."""
    free = enter(limiter)
    free.charge(10**9)
    with enter(limiter, max_tokens_per_minute=10) as limited:
        limited.charge(10)
        limited.accept()
        free.spend(5)
        with free:
            pass
        with enter(limiter, max_tokens_per_minute=10) as ticket, pytest.raises(TenantLimit):
            ticket.charge(1)
    with enter(limiter) as ticket:
        ticket.charge(10**9)


def test_memory_follows_who_is_active(limiter: TenantLimiter, clock: Clock) -> None:
    """Tenants whose buckets are full again are forgotten; those with live calls are not."""
    live = enter(limiter, "live", max_requests_per_minute=60, max_concurrent_requests=1)
    for number in range(10_000):
        clock.now += 1.0
        with enter(limiter, f"t{number}", max_requests_per_minute=60) as ticket:
            ticket.accept()
    assert limiter.num_tenants < 200
    with pytest.raises(TenantLimit):
        enter(limiter, "live", max_requests_per_minute=60, max_concurrent_requests=1)
    with live:
        pass
    enter(limiter, "live", max_requests_per_minute=60, max_concurrent_requests=1)


def test_a_call_without_limits_needs_no_limiter() -> None:
    """As when the service has no keys at all."""
    with Ticket("anyone") as ticket:
        ticket.charge(10**12)
        ticket.accept()
        ticket.spend(10**12)
    assert ticket.tenant == "anyone"
