"""How long a request that comes now would wait to be admitted, judged by the last ones."""

from __future__ import annotations

from collections import deque

_WINDOW = 64
_KNOWN_FROM = 8


class QueueWait:
    """How much time passes between two admissions while somebody waits, over the last of them.

    Time in which nobody waits counts nothing; a queue that stands still makes the estimate
    grow.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._gaps: deque[float] = deque(maxlen=_WINDOW)
        # Since when the next one has been waiting for the last, or for its own arrival.
        self._since = 0.0

    def note_arrival(self, now: float, num_waiting: int) -> None:
        """A group joins the queue, behind so many."""
        if num_waiting == 0:
            self._since = now

    def note_admission(self, now: float) -> None:
        """A group left the queue to run."""
        self._gaps.append(max(now - self._since, 0.0))
        self._since = now

    def estimate(self, num_waiting: int, now: float) -> float | None:
        """Seconds until all who wait, and one more, are admitted.

        Args:
            num_waiting: groups in the queue.
            now: seconds, on the clock of admissions.
        Returns: 0 if nobody waits; None while too few admissions were seen.
        """
        if num_waiting == 0:
            return 0.0
        if len(self._gaps) < _KNOWN_FROM:
            return None
        seconds = sum(self._gaps) + max(now - self._since, 0.0)
        return (num_waiting + 1) * seconds / len(self._gaps)
