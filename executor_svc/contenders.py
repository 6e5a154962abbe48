"""Which schedulers have asked for this executor lately: from it each counts its share."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_NAMES = 64
EXPIRY_SECONDS = 5.0


class Contenders:
    """Names of schedulers, each with the time at which it asked last.

    Invariant: at most MAX_NAMES, so that whoever reaches the port cannot fill the memory;
    of more, those that asked longest ago are forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives monotonic seconds."""
        self._clock = clock
        self._asked: OrderedDict[str, float] = OrderedDict()  # who asked last is last

    def note(self, name: str) -> None:
        """A scheduler asked just now; the empty name is nobody's."""
        if not name:
            return
        self._asked[name] = self._clock()
        self._asked.move_to_end(name)
        if len(self._asked) > MAX_NAMES:
            self._asked.popitem(last=False)

    def forget(self, name: str) -> None:
        """A scheduler is gone, until it asks again."""
        self._asked.pop(name, None)

    def names(self, owner: str) -> list[str]:
        """Give those that asked within the last EXPIRY_SECONDS, and the owner, sorted.

        Args:
            owner: counts while its lease lives, whenever it asked; "" if there is none.
        """
        oldest = self._clock() - EXPIRY_SECONDS
        while self._asked and next(iter(self._asked.values())) < oldest:
            self._asked.popitem(last=False)
        return sorted({*self._asked, owner} - {""})
