"""The process around the scheduler: its loop, and its search for garbage."""

from __future__ import annotations

import asyncio
import builtins
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from scheduler_svc import runtime


@pytest.fixture
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


async def _loop_module() -> str:
    await asyncio.sleep(0)
    return type(asyncio.get_running_loop()).__module__


def test_it_runs_on_uvloop_where_there_is_one() -> None:
    """And hands the result on."""
    pytest.importorskip("uvloop")
    assert runtime.run(_loop_module()).startswith("uvloop")


def test_it_runs_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not published, asyncio's own loop serves."""
    load = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name == "uvloop":
            raise ImportError(name)
        return load(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert runtime.run(_loop_module()).startswith("asyncio")


@pytest.mark.usefixtures("_as_before")
def test_what_is_loaded_is_not_looked_at_again() -> None:
    """Cycles made later are still found."""
    runtime.look_for_garbage_seldom()
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold()[0] >= 10_000
    cycle: list[Any] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1
