"""How long a step may take before its executor counts as hung: learned from steps."""

from __future__ import annotations

import time
from collections import deque

_FACTOR = 20.0
_WINDOW_STEPS = 256
_LEARNED_STEPS = 16


class StepDeadline:
    """Twenty times the longest of the last steps, within bounds.

    A step of many tokens may also take as long as if each had a step of its own, by the slowest
    of the last steps. An executor's first steps compile and warm up: until some are known the
    upper bound holds.
    """

    def __init__(self, least_seconds: float, most_seconds: float) -> None:
        """Know nothing yet; `most_seconds` wins where the bounds contradict each other."""
        self._least, self._most = min(least_seconds, most_seconds), most_seconds
        # Per half window the longest, of a step and of a token: the older half is dropped whole.
        self._longest: deque[float] = deque([0.0, 0.0], maxlen=2)
        self._slowest: deque[float] = deque([0.0, 0.0], maxlen=2)
        self._num_in_half = 0
        self._num_steps = 0

    def seconds(self, num_tokens: int) -> float:
        """Say what a step of so many tokens may take."""
        if self._num_steps < _LEARNED_STEPS:
            return self._most
        expected = max(_FACTOR * max(self._longest), max(self._slowest) * num_tokens)
        return min(max(expected, self._least), self._most)

    def observe(self, seconds: float, num_tokens: int) -> None:
        """Take in how long a step of so many tokens took."""
        self._num_steps += 1
        self._num_in_half += 1
        if self._num_in_half > _WINDOW_STEPS // 2:
            self._longest.append(0.0)
            self._slowest.append(0.0)
            self._num_in_half = 1
        self._longest[-1] = max(self._longest[-1], seconds)
        self._slowest[-1] = max(self._slowest[-1], seconds / max(1, num_tokens))

    def forget(self) -> None:
        """Begin anew: another process may answer at this address."""
        self._longest.extend((0.0, 0.0))
        self._slowest.extend((0.0, 0.0))
        self._num_in_half = self._num_steps = 0


class StepClock:
    """How long the oldest step in flight has been awaited, against its deadline."""

    def __init__(self, least_seconds: float, most_seconds: float) -> None:
        """Start now; the bounds are those of `StepDeadline`."""
        self._deadline = StepDeadline(least_seconds, most_seconds)
        self._since = time.monotonic()

    @property
    def waited(self) -> float:
        """Seconds since the step was given, or the one before it came back."""
        return time.monotonic() - self._since

    def start(self) -> None:
        """A step is given to an executor that has no other."""
        self._since = time.monotonic()

    def note_result(self, num_tokens: int) -> None:
        """A step of so many tokens came back."""
        self._deadline.observe(self.waited, num_tokens)
        self._since = time.monotonic()

    def excuse(self, seconds: float) -> None:
        """Do not count time in which this very process stood still."""
        self._since = min(self._since + max(0.0, seconds), time.monotonic())

    def is_late(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens should have come back by now."""
        return self.waited > self._deadline.seconds(num_tokens)

    def forget(self) -> None:
        """Begin anew: another process may answer."""
        self._deadline.forget()
