"""How long a request that comes now would wait to be admitted, judged by the last ones."""

from __future__ import annotations

from collections import deque

_WINDOW = 64
_KNOWN_FROM = 8


class QueueWait:
    """Admissions per second, over the last of them.

    A queue that stands still makes the estimate grow: time passes without an admission.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._times: deque[float] = deque(maxlen=_WINDOW)

    def note_admission(self, now: float) -> None:
        """Count a group that left the queue to run."""
        self._times.append(now)

    def estimate(self, num_waiting: int, now: float) -> float | None:
        """Seconds until all who wait, and one more, are admitted.

        Args:
            num_waiting: groups in the queue.
            now: seconds, on the clock of admissions.
        Returns: 0 if nobody waits; None while too few admissions were seen.
        """
        if num_waiting == 0:
            return 0.0
        if len(self._times) < _KNOWN_FROM:
            return None
        return (num_waiting + 1) * max(now - self._times[0], 0.0) / len(self._times)

    def forget(self) -> None:
        """Begin anew: with another executor the pace is another."""
        self._times.clear()
