"""How long work in the store reports what it is doing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID


class Progress(Protocol):
    """Hears of each stage of a fetch; never asked to decide anything."""

    def stage(self, text: str) -> None:
        """A new stage begins; the one before it is done."""

    def update(self, done: int, total: int) -> None:
        """The current stage has done this many of its total units."""

    def warn(self, text: str) -> None:
        """Something the user should know that does not stop the work."""


class Silent:
    """Reports nothing: for tests and for callers with no terminal."""

    def stage(self, text: str) -> None:
        """Ignore."""

    def update(self, done: int, total: int) -> None:
        """Ignore."""

    def warn(self, text: str) -> None:
        """Ignore."""


class PlainLines:
    """One line a stage on stderr: for logs and pipes, where a spinner is noise."""

    def stage(self, text: str) -> None:
        """Print the stage."""
        sys.stderr.write(f"{text} ...\n")
        sys.stderr.flush()

    def update(self, done: int, total: int) -> None:
        """Ignore: percentages would fill a log."""

    def warn(self, text: str) -> None:
        """Print the warning."""
        sys.stderr.write(f"warning: {text}\n")
        sys.stderr.flush()


class Terminal:
    """A spinner, a bar where the amount is known, and a tick for each finished stage."""

    def __init__(self, console: Console) -> None:
        """Draw on this console, which should be one on stderr."""
        from rich import progress as bars

        self._console = console
        self._bars = bars.Progress(
            bars.SpinnerColumn(),
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=24),
            bars.TaskProgressColumn(),
            bars.TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._current: TaskID | None = None
        self._text = ""

    def __enter__(self) -> Terminal:
        """Start drawing."""
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tick the last stage unless it failed, and stop drawing."""
        self._finish(done=error is None)
        self._bars.stop()

    def stage(self, text: str) -> None:
        """Tick the stage before and spin on this one."""
        self._finish(done=True)
        self._text = text
        self._current = self._bars.add_task(text, total=None)

    def update(self, done: int, total: int) -> None:
        """Move the bar."""
        if self._current is not None:
            self._bars.update(self._current, completed=done, total=total)

    def warn(self, text: str) -> None:
        """Print the warning above the spinner."""
        self._console.print(f"[yellow]warning:[/yellow] {text}", highlight=False)

    def _finish(self, *, done: bool) -> None:
        if self._current is None:
            return
        self._bars.remove_task(self._current)
        self._current = None
        if done:
            self._console.print(f"[green]✓[/green] {self._text}", highlight=False)


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep the bars that libraries draw by themselves off the terminal for a while.

    Each of them has another switch, and some have none; all of them draw with tqdm.
    """
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # published without types

    draw = tqdm.__init__
    tqdm.__init__ = partialmethod(draw, disable=True)
    try:
        yield
    finally:
        tqdm.__init__ = draw
