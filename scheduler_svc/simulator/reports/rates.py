"""The highest request rate that a system sustains: a search, which also gives the curve."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_STEP = 1.3
_MAX_STEP = 2.5
_MAX_RUNS = 24
_CLOSE = 0.10
LOW_POINTS = (0.3, 0.6, 0.85)


class RatesError(RuntimeError):
    """No bracket was found; the message says how far the search went."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Latency over request rate.

    Attributes:
        points: (requests/s, latency in seconds a token), by rate.
        sustained: requests/s at which the latency reaches the bound.
    """

    points: tuple[tuple[float, float], ...]
    sustained: float

    @property
    def rates(self) -> list[float]:
        """The x values."""
        return [rate for rate, _ in self.points]

    @property
    def latencies(self) -> list[float]:
        """The y values."""
        return [latency for _, latency in self.points]


def find_sustained(
    measure: Callable[[float], float],
    *,
    guess: float,
    bound: float,
    precision: float = 0.03,
    low_points: tuple[float, ...] = LOW_POINTS,
) -> Curve:
    """Find where a latency that grows with the rate crosses a bound.

    From the guess the rate goes up or down by growing factors until the bound lies between
    two rates. Then the next rate is where the logarithm of the latency would cross if it were
    a straight line between them, kept off the ends. The search is over when the two are within
    `precision` of each other or the last latency is within 10% of the bound, where the
    straight line is good enough.

    Args:
        measure: latency in seconds a token at a rate.
        guess: requests/s to begin with.
        bound: seconds a token.
        precision: of the rate, relative.
        low_points: shares of the sustained rate to measure too, for the curve.
    Raises:  RatesError: if the bound is not crossed within 24 runs.
    """
    found: dict[float, float] = {}

    def is_slow(rate: float) -> bool:
        if len(found) >= _MAX_RUNS:
            least, most = min(found), max(found)
            raise RatesError(
                f"latency does not cross {bound:g} s/token between {least:g} and "
                f"{most:g} requests/s"
            )
        found[rate] = measure(rate)
        return found[rate] > bound

    low, high = _bracket(is_slow, guess)
    while high / low > 1 + precision:
        middle = _crossing((low, found[low]), (high, found[high]), bound)
        margin = (high - low) * 0.1
        middle = min(max(middle, low + margin), high - margin)
        if is_slow(middle):
            high = middle
        else:
            low = middle
        if abs(found[middle] / bound - 1) < _CLOSE:
            break
    sustained = _crossing((low, found[low]), (high, found[high]), bound)
    for share in low_points:
        rate = share * sustained
        if not any(abs(rate / each - 1) < 2 * precision for each in found):
            found[rate] = measure(rate)
    return Curve(tuple(sorted(found.items())), sustained)


def _bracket(is_slow: Callable[[float], bool], guess: float) -> tuple[float, float]:
    """Find two rates between which it becomes too slow."""
    low = high = guess
    step = _STEP
    if is_slow(guess):
        low = guess / step
        while is_slow(low):
            step = min(_MAX_STEP, step * step)
            low, high = low / step, low
    else:
        high = guess * step
        while not is_slow(high):
            step = min(_MAX_STEP, step * step)
            low, high = high, high * step
    return low, high


def _crossing(low: tuple[float, float], high: tuple[float, float], bound: float) -> float:
    (rate, latency), (next_rate, next_latency) = low, high
    rise = math.log(next_latency) - math.log(latency)
    share = (math.log(bound) - math.log(latency)) / rise if rise > 0 else 1.0
    return rate + share * (next_rate - rate)
