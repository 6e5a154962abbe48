"""How long a step may take before its executor counts as hung: learned from steps."""

from __future__ import annotations

from collections import deque

_FACTOR = 20.0
_WINDOW_STEPS = 256
_LEARNED_STEPS = 16


class StepDeadline:
    """Twenty times the longest of the last steps, within bounds.

    An executor's first steps compile and warm up: until some are known the upper bound
    holds.
    """

    def __init__(self, least_seconds: float, most_seconds: float) -> None:
        """Know nothing yet; `most_seconds` wins where the bounds contradict each other."""
        self._least, self._most = min(least_seconds, most_seconds), most_seconds
        # Per half window the longest: the older half is dropped whole.
        self._longest: deque[float] = deque([0.0, 0.0], maxlen=2)
        self._num_in_half = 0
        self._num_steps = 0

    @property
    def seconds(self) -> float:
        """What the next step may take."""
        if self._num_steps < _LEARNED_STEPS:
            return self._most
        return min(max(_FACTOR * max(self._longest), self._least), self._most)

    def observe(self, seconds: float) -> None:
        """Take in how long a step took."""
        self._num_steps += 1
        self._num_in_half += 1
        if self._num_in_half > _WINDOW_STEPS // 2:
            self._longest.append(0.0)
            self._num_in_half = 1
        self._longest[-1] = max(self._longest[-1], seconds)

    def forget(self) -> None:
        """Begin anew: another process may answer at this address."""
        self._longest.extend((0.0, 0.0))
        self._num_in_half = self._num_steps = 0
