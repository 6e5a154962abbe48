"""The three descriptors that every process is taken to have."""

from __future__ import annotations

import os
import sys


def ensure_standard_streams() -> None:
    """Open what whoever started this process closed of stdin, stdout and stderr, as /dev/null.

    Else a socket or a file would get its number, and native libraries abort over that.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
