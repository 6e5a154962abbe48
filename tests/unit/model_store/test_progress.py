"""What a terminal shows while a model is prepared."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tqdm.auto import tqdm

from executor_svc.model_store._progress import Terminal, no_bars


def screen() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)


def test_finished_stages_are_ticked():
    """Each stage leaves one line behind."""
    console = screen()
    with Terminal(console) as terminal:
        terminal.stage("first")
        terminal.update(5, 10)
        terminal.stage("second")
    shown = console.file.getvalue()
    assert "✓ first" in shown
    assert "✓ second" in shown


def test_a_failed_stage_is_not_ticked():
    """The tick means done."""
    console = screen()
    with pytest.raises(RuntimeError), Terminal(console) as terminal:
        terminal.stage("first")
        terminal.stage("second")
        raise RuntimeError
    shown = console.file.getvalue()
    assert "✓ first" in shown
    assert "✓ second" not in shown


def test_libraries_bars_are_hidden_for_a_while_only(capsys):
    """A bar drawn inside is silent, one drawn after is not."""
    with no_bars():
        list(tqdm(range(3), desc="inside"))
    list(tqdm(range(3), desc="after"))
    shown = capsys.readouterr().err
    assert "inside" not in shown
    assert "after" in shown
