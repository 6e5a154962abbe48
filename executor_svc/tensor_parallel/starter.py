"""Ranks end with whoever started them, from their first line on."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from executor_svc.errors import StartupError

STARTER_VARIABLE = "OCTAVO_EXECUTOR_RANKS_STARTER"
"""Process id of the launcher, in the environment of its ranks; torchrun sets none."""

_PR_SET_PDEATHSIG = 1


def end_with_starter() -> None:
    """Ask the kernel to kill this process when its parent dies; elsewhere `watch.py` sees it.

    Raises:
        StartupError: if the parent is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    starter = os.environ.get(STARTER_VARIABLE)
    if starter is not None and starter != str(os.getppid()):
        raise StartupError("the process that started the ranks is gone")
