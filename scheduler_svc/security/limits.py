"""What a tenant may use: requests at once, requests and tokens a minute.

Rates are token buckets: a bucket holds a minute's allowance, starts full, and fills
steadily. A call is refused before it costs anything, with the time after which it would
not be. A prompt's tokens are taken when the call is accepted; output tokens when they are
made, since nobody knows before how many there will be. So a bucket may come to owe, at
most by the output of the calls that run at once, and new calls wait until it has paid.

Plain synchronous code: the clock is given.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from scheduler_svc.errors import TenantLimit
from scheduler_svc.security.keys import TenantLimits

_SECONDS = 60.0  # that fill a bucket
_RETRY_SECONDS = 1.0  # after which one of the requests at once may have ended
_ROUNDING = 1e-12  # of a capacity: the sum of many refills is not exact
_MIN_SWEEP = 64


class TokenBucket:
    """An allowance that grows back.

    Invariant: over any span of t seconds, what `take` takes when `wait` said 0 is at most
    one capacity, plus t/60 capacities, plus the largest single amount.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        """Start full.

        Args:
            per_minute: capacity, and what flows in in a minute.
            now: seconds, on any clock that does not go back.
        """
        self._capacity = per_minute
        self._level = float(per_minute)
        self._updated = now

    def wait(self, amount: int, now: float) -> float:
        """Give the seconds until `amount` may be taken; 0: now.

        An amount above the capacity, as of a long prompt, waits for a full bucket and then
        leaves it owing: otherwise it could never be taken.
        """
        self._refill(now)
        missing = min(amount, self._capacity) - self._level
        is_there = missing <= _ROUNDING * self._capacity
        return 0.0 if is_there else missing * _SECONDS / self._capacity

    def take(self, amount: int, now: float) -> None:
        """Take an amount, whether it is there or not."""
        self._refill(now)
        self._level -= amount

    def give_back(self, amount: int, now: float) -> None:
        """Put back what was taken in vain."""
        self._refill(now)
        self._level = min(self._level + amount, self._capacity)

    def resize(self, per_minute: int, now: float) -> None:
        """Change the capacity; what was used of the old one stays used."""
        if per_minute == self._capacity:
            return
        self._refill(now)
        self._level += per_minute - self._capacity
        self._capacity = per_minute

    def is_full(self, now: float) -> bool:
        """Whether it is as if nothing had ever been taken."""
        self._refill(now)
        return self._level >= self._capacity * (1 - _ROUNDING)

    def _refill(self, now: float) -> None:
        elapsed = max(now - self._updated, 0.0)
        grown = self._level + elapsed * self._capacity / _SECONDS
        self._level = min(grown, self._capacity)
        self._updated = max(now, self._updated)


class _Usage:
    """What one tenant has of its limits; a rate without a limit has no bucket."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.num_live = 0
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None

    def is_idle(self, now: float) -> bool:
        """Whether forgetting it changes nothing."""
        buckets = (self.requests, self.tokens)
        return not self.num_live and all(b is None or b.is_full(now) for b in buckets)


class Ticket:
    """One call's part of its tenant's limits.

    Use it as a context manager. Its place among the requests at once is free again when it
    is left, in whatever way; what it took of the rates goes back unless `accept` was called.

    Attributes:
        tenant: whom the call counts for.
    """

    def __init__(
        self, tenant: str, usage: _Usage | None = None, limits: TenantLimits | None = None
    ) -> None:
        """Stand for a call without limits, or with a place that `TenantLimiter` gave."""
        self.tenant = tenant
        self._usage = usage
        self._limits = limits or TenantLimits()
        self._requests = usage.requests if usage else None
        self._tokens = usage.tokens if usage else None
        self._num_taken = 0
        self._is_accepted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        usage = self._usage
        if usage is None:
            return
        usage.num_live -= 1
        if not self._is_accepted:
            now = usage.clock()
            if self._requests is not None:
                self._requests.give_back(1, now)
            if self._tokens is not None:
                self._tokens.give_back(self._num_taken, now)

    def charge(self, num_tokens: int) -> None:
        """Take the tokens of the prompt.

        Raises:  TenantLimit: if they are not there yet.
        """
        if self._usage is None or self._tokens is None:
            return
        now = self._usage.clock()
        seconds = self._tokens.wait(num_tokens, now)
        if seconds:
            limit = self._limits.max_tokens_per_minute
            raise TenantLimit(self.tenant, "max_tokens_per_minute", limit, seconds)
        self._tokens.take(num_tokens, now)
        self._num_taken += num_tokens

    def accept(self) -> None:
        """Keep what was taken: the call is worked on."""
        self._is_accepted = True

    def spend(self, num_tokens: int) -> None:
        """Take tokens that were generated."""
        if self._usage is not None and self._tokens is not None:
            self._tokens.take(num_tokens, self._usage.clock())


class TenantLimiter:
    """Lets calls in within their tenants' limits.

    Memory grows with the tenants that used something in the last minutes, not with all
    that ever called.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start with every bucket full.

        Args:
            clock: seconds, never going back.
        """
        self._clock = clock
        self._usages: dict[str, _Usage] = {}
        self._sweep_at = _MIN_SWEEP

    @property
    def num_tenants(self) -> int:
        """Tenants of whom something is remembered."""
        return len(self._usages)

    def enter(self, tenant: str, limits: TenantLimits) -> Ticket:
        """Let a call in.

        Args:
            tenant: whom it counts for.
            limits: the tenant's, as they are now.
        Raises:  TenantLimit: naming the limit that is reached; nothing is taken then.
        """
        now = self._clock()
        usage = self._usage(tenant, limits, now)
        most = limits.max_concurrent_requests
        if most is not None and usage.num_live >= most:
            raise TenantLimit(tenant, "max_concurrent_requests", most, _RETRY_SECONDS)
        if usage.requests is not None:
            seconds = usage.requests.wait(1, now)
            if seconds:
                limit = limits.max_requests_per_minute
                raise TenantLimit(tenant, "max_requests_per_minute", limit, seconds)
            usage.requests.take(1, now)
        usage.num_live += 1
        return Ticket(tenant, usage, limits)

    def _usage(self, tenant: str, limits: TenantLimits, now: float) -> _Usage:
        usage = self._usages.get(tenant)
        if usage is None:
            self._forget_idle(now)
            usage = self._usages[tenant] = _Usage(self._clock)
        usage.requests = _fit(usage.requests, limits.max_requests_per_minute, now)
        usage.tokens = _fit(usage.tokens, limits.max_tokens_per_minute, now)
        return usage

    def _forget_idle(self, now: float) -> None:
        """Forget who is as good as new, whenever there are twice as many as after the last time."""
        if len(self._usages) < self._sweep_at:
            return
        kept = {name: each for name, each in self._usages.items() if not each.is_idle(now)}
        self._usages = kept
        self._sweep_at = max(_MIN_SWEEP, 2 * len(kept))


def _fit(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    """Give the bucket that the limit of this moment calls for."""
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket
