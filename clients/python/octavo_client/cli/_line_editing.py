"""Editing of a line in the terminal, and what was typed before, by the arrow keys.

By readline, where Python has it; pasted lines stay together. What is typed is kept from one
time to the next in a file that only its user may read.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from pathlib import Path

_MAX_LINES = 1000


def start_line_editing(*, keep_history: bool) -> None:
    """Edit lines from now on; with `keep_history` begin with what was typed before."""
    try:
        import readline
    except ImportError:
        return
    if not keep_history:
        return
    file = history_file()
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(_MAX_LINES)
    atexit.register(_write, file)


def history_file() -> Path:
    """Where lines are kept, by the XDG base directory specification."""
    root = os.environ.get("XDG_STATE_HOME")
    return (Path(root) if root else Path.home() / ".local" / "state") / "octavo" / "chat_history"


def _write(file: Path) -> None:
    import readline

    with contextlib.suppress(OSError):  # a read-only home: the chat was none the worse
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
        readline.write_history_file(file)
