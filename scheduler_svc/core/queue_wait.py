"""How long a request that comes now would wait to be admitted, judged by the last ones.

Two answers, of which the longer counts. The pace of admissions is right when places are given
back evenly. When those that run were admitted together, as after a burst, they end together
too: then it is how long the last ones ran that tells when the next place is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_WINDOW = 64
_KNOWN_FROM = 8


class QueueWait:
    """Watches a queue: times between two admissions while somebody waits, and how long
    groups keep their places.

    Time in which nobody waits counts nothing; a queue that stands still makes the estimate
    grow.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._gaps: deque[float] = deque(maxlen=_WINDOW)
        self._runs: deque[float] = deque(maxlen=_WINDOW)
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

    def note_end(self, seconds: float) -> None:
        """A group ended, so long after its admission."""
        self._runs.append(max(seconds, 0.0))

    def estimate(self, num_waiting: int, now: float, begun: Iterable[float]) -> float | None:
        """Seconds until all who wait, and one more, are admitted; there is no room for it now.

        Args:
            num_waiting: groups in the queue.
            now: seconds, on the clock of admissions.
            begun: when those that run were admitted.
        Returns: None while too little was seen.
        """
        found = (self._by_pace(num_waiting, now), self._by_ends(num_waiting, now, begun))
        return max((seconds for seconds in found if seconds is not None), default=None)

    def _by_pace(self, num_waiting: int, now: float) -> float | None:
        if num_waiting == 0:
            return 0.0  # nobody has waited, so there is no pace
        if len(self._gaps) < _KNOWN_FROM:
            return None
        seconds = sum(self._gaps) + max(now - self._since, 0.0)
        return (num_waiting + 1) * seconds / len(self._gaps)

    def _by_ends(self, num_waiting: int, now: float, begun: Iterable[float]) -> float | None:
        if len(self._runs) < _KNOWN_FROM:
            return None
        usual = sum(self._runs) / len(self._runs)
        left = sorted(max(usual - (now - at), 0.0) for at in begun)
        if not left:
            return None
        rounds, index = divmod(num_waiting, len(left))
        return left[index] + rounds * usual
