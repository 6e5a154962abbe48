"""A lock between processes that dies with its holder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from executor_svc.model_store.errors import StoreBusy

POLL_SECONDS = 0.2


@contextmanager
def locked(
    path: Path, *, deadline_seconds: float, on_wait: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the file's lock; the kernel drops it when the process ends, however it ends.

    Args:
        path: lock file, made if absent and left behind (removing it would let two
            processes lock two files of the same name).
        deadline_seconds: how long to wait for another holder.
        on_wait: called once if there is another holder.
    Raises:  StoreBusy: if the deadline passes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _acquire(descriptor, path, deadline_seconds, on_wait)
        yield
    finally:
        os.close(descriptor)


def _acquire(
    descriptor: int, path: Path, deadline_seconds: float, on_wait: Callable[[], None]
) -> None:
    end = time.monotonic() + deadline_seconds
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise StoreBusy(
                    f"another process has held {path} for {deadline_seconds:.0f} s: "
                    "wait for it or end it, then try again"
                ) from None
        if not told:
            on_wait()
            told = True
        time.sleep(POLL_SECONDS)
