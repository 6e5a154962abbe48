"""What streams saw in the last seconds, in constant memory and time.

One histogram a second, of buckets that grow by a tenth each: a percentile is right within
5%, however many tokens came.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

_NUM_SECONDS = 10
_LEAST_SECONDS = 1e-4
_GROWTH = math.log(1.1)
_NUM_BUCKETS = 160
"""Up to 4e2 seconds; what is longer counts as that."""


@dataclass(slots=True)
class _Second:
    number: int = -1
    counts: list[int] = field(default_factory=lambda: [0] * _NUM_BUCKETS)


class LatencyWindow:
    """Percentiles of the last ten seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Read the time, in seconds, from `clock`."""
        self._clock = clock
        self._seconds = [_Second() for _ in range(_NUM_SECONDS)]

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a latency so many times."""
        self._now().counts[_bucket(seconds)] += count

    def percentiles(self, *percents: float) -> tuple[int, list[float]]:
        """Give how many were counted, and the percentiles in seconds; 0 if there was none."""
        oldest = int(self._clock()) - _NUM_SECONDS
        fresh = [second.counts for second in self._seconds if second.number > oldest]
        counts = [sum(column) for column in zip(*fresh, strict=True)] if fresh else []
        total = sum(counts)
        return total, [_percentile(counts, total, percent) for percent in percents]

    def _now(self) -> _Second:
        number = int(self._clock())
        second = self._seconds[number % _NUM_SECONDS]
        if second.number != number:
            second.number, second.counts = number, [0] * _NUM_BUCKETS
        return second


def _bucket(seconds: float) -> int:
    if seconds <= _LEAST_SECONDS:
        return 0
    return min(_NUM_BUCKETS - 1, int(math.log(seconds / _LEAST_SECONDS) / _GROWTH))


def _percentile(counts: list[int], total: int, percent: float) -> float:
    rank = max(1, math.ceil(total * percent / 100))
    seen = 0
    for bucket, count in enumerate(counts):
        seen += count
        if seen >= rank:
            return _LEAST_SECONDS * math.exp((bucket + 0.5) * _GROWTH)
    return 0.0
