"""When executors fail, and when there are to be more or fewer of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

_TOLERANCE = 0.1
"""Kubernetes' horizontal autoscaler leaves a ratio within 10% of 1 alone."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Silent deaths of executors.

    Attributes:
        per_executor_hour: mean number for each executor, at times drawn independently;
            0.01 is one in a hundred an hour.
        down_seconds: until a dead one is back, empty.
        detect_seconds: until its scheduler notices.
        at: further ones, as (seconds, index of the executor).
    Raises:  ValueError: naming the field and the bound.
    """

    per_executor_hour: float = 0.0
    down_seconds: float = 60.0
    detect_seconds: float = 0.0
    at: tuple[tuple[float, int], ...] = ()

    def __post_init__(self) -> None:
        """Check the bounds."""
        for name in ("per_executor_hour", "down_seconds", "detect_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.detect_seconds > self.down_seconds:
            raise ValueError(
                f"detect_seconds must be at most down_seconds ({self.down_seconds:g}), "
                f"got {self.detect_seconds:g}"
            )
        if any(when < 0 or index < 0 for when, index in self.at):
            raise ValueError(f"at must hold seconds and indices from 0, got {self.at}")


@dataclass(frozen=True, slots=True)
class Autoscale:
    """How many executors there should be, by the rule of Kubernetes' autoscaler.

    wanted = ceil(present * max(wait / queue_wait_seconds, use / block_use)), where `wait` is
    how long the first in line has waited at the worst executor and `use` the mean share of
    referenced blocks. More are started at once, at most twice as many or 4 more in a period;
    fewer only when the wish was lower for `calm_seconds`, and then the highest wish counts.

    Attributes:
        min_executors, max_executors: bounds.
        queue_wait_seconds, block_use: targets.
        period_seconds: between two looks.
        start_seconds: until a new one takes requests.
        calm_seconds: the window in which the highest wish counts.
    Raises:  ValueError: naming the field and the bound.
    """

    min_executors: int
    max_executors: int
    queue_wait_seconds: float = 1.0
    block_use: float = 0.8
    period_seconds: float = 15.0
    start_seconds: float = 60.0
    calm_seconds: float = 300.0

    def __post_init__(self) -> None:
        """Check the bounds."""
        if not 1 <= self.min_executors <= self.max_executors:
            raise ValueError(
                f"min_executors must be from 1 to max_executors ({self.max_executors}), "
                f"got {self.min_executors}"
            )
        for name in ("queue_wait_seconds", "block_use", "period_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("start_seconds", "calm_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    def wanted(self, present: int, wait_seconds: float, block_use: float) -> int:
        """Say how many there should be now, within bounds and steps, before any calming."""
        ratio = max(wait_seconds / self.queue_wait_seconds, block_use / self.block_use)
        wish = present if abs(ratio - 1) <= _TOLERANCE else math.ceil(present * ratio)
        wish = min(wish, max(2 * present, present + 4))
        return min(max(wish, self.min_executors), self.max_executors)
