"""Values read from files that are replaced while a process runs: certificates, API keys.

Kubernetes and cert-manager replace such files by moving a symbolic link. A look at the
files' inodes, sizes and times costs microseconds, so whoever needs the value just asks for
it each time, and no thread has to watch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")
_Stamp = tuple[int, ...]


class Reloading(Generic[T]):
    """The last sound value of some files.

    Invariant: `current` never fails and never gives a value that `load` refused; files that
    are broken or gone leave the value as it was. Any thread may call it.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """Read the value for the first time.

        Args:
            paths: the files; symbolic links are followed at every look.
            load: reads them; raises ValueError or OSError, with one line and no secret in
                its message, if what they hold cannot be used.
        Raises:  what `load` raises.
        """
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        # Looked at before reading: a change in between is seen at the next look.
        self._stamps = self._look()
        self._value = load()

    def current(self) -> T:
        """Give the newest sound value; the same object as long as nothing has changed."""
        with self._lock:
            stamps = self._look()
            if stamps != self._stamps:
                self._stamps = stamps
                self._read_again()
            return self._value

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(_stamp(path) for path in self._paths)

    def _read_again(self) -> None:
        """Take the new value, or say once why not: it is not tried again until it changes."""
        files = [str(path) for path in self._paths]
        try:
            value = self._load()
        except (ValueError, OSError) as error:
            _log.error("files_refused", extra={"files": files, "reason": str(error)})
            return
        if value != self._value:
            self._value = value
            _log.info("files_reloaded", extra={"files": files})


def _stamp(path: Path) -> _Stamp:
    """What changes when a file does; a file that cannot be seen has its error's number."""
    try:
        status = path.stat()
    except OSError as error:
        return (error.errno or 0,)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
