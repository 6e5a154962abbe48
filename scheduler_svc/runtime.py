"""How a scheduler's process runs: its event loop, and when it looks for garbage."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_GC_THRESHOLDS = (20_000, 20, 50)
"""Net new objects before the youngest are looked at, and how many such looks before an
older generation is. Requests hold no cycles, so there is little to find."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end on uvloop, or on asyncio's own loop where it is not installed."""
    loop_factory = None
    with suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main)


def look_for_garbage_seldom() -> None:
    """Call it when everything is loaded: what there is now is never looked at again.

    By Python's own thresholds a sixth of a scheduler's time went, while long prompts came
    in, into looking through the token lists of live requests for cycles; each look is a
    pause in which no plan is made.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
