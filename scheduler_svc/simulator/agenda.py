"""Simulated time: what is to happen, in order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Act = Callable[[float, int], None]


class Agenda:
    """A heap of acts by time; what is due at one time happens in the order of its booking."""

    def __init__(self) -> None:
        """Start at 0 seconds with nothing to do."""
        self.now = 0.0
        self._heap: list[tuple[float, int, Act, int]] = []
        self._serial = 0

    def book(self, when: float, act: Act, argument: int = 0) -> None:
        """Let `act(when, argument)` be called then; a time that is past counts as now."""
        self._serial += 1
        heapq.heappush(self._heap, (max(when, self.now), self._serial, act, argument))

    @property
    def next_time(self) -> float:
        """When the next act is due; infinite if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def advance(self) -> None:
        """Go on to the next act and do it."""
        when, _, act, argument = heapq.heappop(self._heap)
        self.now = when
        act(when, argument)
