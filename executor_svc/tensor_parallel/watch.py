"""Notices when a rank is gone, whatever the others wait for.

A thread in every rank meets those of the others once a second. A rank that dies closes its
connections, so the meeting fails at once in all others; one that hangs misses it. A thread of
its own is needed since a sum on a GPU waits for a dead peer without end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from torch import distributed

from executor_svc.errors import DeviceLost
from executor_svc.tensor_parallel.ranks import Ranks, lost

_PERIOD_SECONDS = 1.0


class Watch:
    """Meets the other ranks until one is missing.

    Invariant: `on_loss` is called at most once, and never after `stop`.
    """

    def __init__(self, ranks: Ranks, on_loss: Callable[[DeviceLost], None], seconds: float) -> None:
        """Made by all ranks at once.

        Args:
            ranks: the group.
            on_loss: called on the watch's own thread.
            seconds: how long a rank may keep the others waiting.
        """
        self._group = ranks.new_group(seconds)
        self._on_loss = on_loss
        self._parent = os.getppid()
        self._stopped = threading.Event()
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="octavo-ranks", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more: ranks end on purpose from now on."""
        with self._telling:
            self._stopped.set()

    def _main(self) -> None:
        while not self._stopped.is_set():
            try:
                distributed.barrier(group=self._group)
            except RuntimeError as error:
                return self._tell(lost(error))
            if os.getppid() != self._parent:
                return self._tell(DeviceLost("the process that started the ranks is gone"))
            time.sleep(_PERIOD_SECONDS)
        return None

    def _tell(self, error: DeviceLost) -> None:
        with self._telling:
            if not self._stopped.is_set():
                self._on_loss(error)
