"""When to ask again, and how long to wait first."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TypeGuard

from octavo_client.errors import ConnectionFailed, OctavoError, Overloaded, Unavailable

_MAX_TURNS = 3


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds of retrying. Only what the service did not run, or can resume, is retried.

    Where a target has replicas, one that is dead takes no attempt: gRPC leaves it out, as long
    as another one answers. One that refuses, since it drains or has no executor, is followed by
    the next at once, and only when they all refuse does the wait begin. If nothing answers at
    all the last attempt fails within some two seconds, by the defaults.

    Attributes:
        max_attempts: calls made in all before the first token came, or rounds of calls to
            the replicas; 1 turns retrying off.
        resume_seconds: how long a stream that broke after tokens came may go without
            progress before the break is reported; 0 turns resuming off.
        initial_backoff_seconds: wait before the first retry; it doubles each time.
        max_backoff_seconds: longest wait, unless the service names a longer one.
        retries_overload: whether a full queue, too, is worth asking again before the first
            token; false for who would rather pass the refusal on at once.
    """

    max_attempts: int = 5
    resume_seconds: float = 60.0
    initial_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0
    retries_overload: bool = True
    _rng: random.Random = field(default_factory=random.Random, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse bounds that make no sense."""
        if self.max_attempts < 1:
            raise ValueError("max_attempts must be at least 1")
        if self.resume_seconds < 0:
            raise ValueError("resume_seconds must not be negative")
        if not 0 < self.initial_backoff_seconds <= self.max_backoff_seconds:
            raise ValueError("initial_backoff_seconds must be above 0, to max_backoff_seconds")

    def covers(
        self, error: OctavoError, *, has_tokens: bool = False
    ) -> TypeGuard[Unavailable | Overloaded]:
        """Whether a call that failed so may be made again; one with tokens is resumed."""
        if isinstance(error, Overloaded):
            return self.retries_overload or has_tokens
        return isinstance(error, Unavailable)

    def delay(self, num_failures: int, retry_after: float | None) -> float:
        """Seconds to wait after that many failures in a row.

        Jitter only ever lengthens the service's own delay, so that a crowd that was
        told the same delay does not come back at the same instant or too early.
        """
        if retry_after is not None:
            return retry_after * self._rng.uniform(1.0, 1.25)
        backoff = self.initial_backoff_seconds * 2.0 ** min(num_failures - 1, 32)
        return min(backoff, self.max_backoff_seconds) * self._rng.uniform(0.5, 1.0)


NO_RETRIES = RetryPolicy(max_attempts=1, resume_seconds=0.0)


class Turns:
    """Tries at the other replicas, when one that was reached does not serve.

    gRPC gives calls to its replicas in turn, and leaves out those that it has no connection
    to. One that is connected and refuses (no executor, draining) keeps its turns; and since
    all calls of a client take turns, the next try may meet the same one again. So a few
    tries follow at once, which count as one attempt together with the first.
    """

    def __init__(self, policy: RetryPolicy, *, has_replicas: bool) -> None:
        self._most = _MAX_TURNS if has_replicas and policy.max_attempts > 1 else 0
        self._num_taken = 0

    def take(self, error: OctavoError) -> bool:
        """Whether to try again at once; if not, the next failure begins anew."""
        # If there is no connection at all, none is there to turn to.
        is_refusal = isinstance(error, Unavailable) and not isinstance(error, ConnectionFailed)
        if is_refusal and self._num_taken < self._most:
            self._num_taken += 1
            return True
        self._num_taken = 0
        return False
