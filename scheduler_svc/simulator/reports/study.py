"""A study: a question, and the function that answers it with simulations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from scheduler_svc.simulator.reports.findings import Findings

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_DEADLINE_SECONDS = 7200.0
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def _ignore() -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Context:
    """How studies are to be run.

    Attributes:
        seed: of all that is drawn.
        small: seconds instead of minutes, for tests; figures then mean little.
        traces: folder of public traces; None: drawn workloads alone.
        pool: processes that work is given to; None: this one does it.
        note_started: told how many pieces of work are to be done.
        note_done: told of each that is.
    """

    seed: int = 0
    small: bool = False
    traces: Path | None = None
    pool: Executor | None = field(default=None, repr=False)
    note_started: Callable[[int], None] = field(default=lambda _: None, repr=False)
    note_done: Callable[[], None] = field(default=_ignore, repr=False)

    def pick(self, full: _Result, small: _Result) -> _Result:
        """Choose a size."""
        return small if self.small else full

    def map(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        """Do pieces of work that do not depend on each other.

        Args:
            function: of a module, so that another process finds it by name.
            items: what it is called with, one at a time.
        Returns: results in the order of the items.
        Raises:  what the function raises first; the pieces that have not begun are dropped.
        """
        work = list(items)
        self.note_started(len(work))
        if self.pool is None:
            found = []
            for item in work:
                found.append(function(item))
                self.note_done()
            return found
        futures: list[Future[_Result]] = []
        for item in work:
            future = self.pool.submit(function, item)
            future.add_done_callback(lambda _: self.note_done())
            futures.append(future)
        try:
            return [future.result(timeout=_DEADLINE_SECONDS) for future in futures]
        finally:
            for future in futures:
                future.cancel()


@dataclass(frozen=True, slots=True)
class Study:
    """One report.

    Attributes:
        name: on the command line and of its files.
        title: for readers.
        question: what is claimed or asked, in words for a newcomer.
        run: finds the answer. Studies run at the same time in threads: no global state.
        page: file that its section is in.
        needs_traces: it is left out where there are none.
    Raises:  ValueError: if the name cannot name files.
    """

    name: str
    title: str
    question: str
    run: Callable[[Context], Findings]
    page: str = "README.md"
    needs_traces: bool = False

    def __post_init__(self) -> None:
        """Check the name."""
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name must be a-z, 0-9 and _, from a letter on, got {self.name!r}")

    def command(self, context: Context) -> str:
        """Return the command line that does the same again."""
        words = ["python -m scheduler_svc.simulator.reproduce", self.name]
        if context.small:
            words.append("--small")
        words.append(f"--seed {context.seed}")
        if self.needs_traces:
            words.append("--traces FOLDER")
        return " ".join(words)
