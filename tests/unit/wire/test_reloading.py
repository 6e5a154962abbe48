"""Tests of octavo.reloading: the last sound value counts, and each fault is told once."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from octavo.reloading import Reloading


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "number"
    file.write_text("1")
    return file


@pytest.fixture
def number(path: Path) -> Reloading[int]:
    return Reloading((path,), lambda: int(path.read_text()))


def replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(path)


def test_a_change_is_seen_at_the_next_look(number: Reloading[int], path: Path) -> None:
    """Replaced or written in place."""
    assert number.current() == 1
    replace(path, "2")
    assert number.current() == 2
    path.write_text("33")
    assert number.current() == 33


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    """Kubernetes swaps the link of a folder; the file's own path never changes."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "number").write_text(str(ord(name)))
    link = tmp_path / "data"
    link.symlink_to("a")
    path = link / "number"
    number = Reloading((path,), lambda: int(path.read_text()))
    assert number.current() == ord("a")
    (tmp_path / "next").symlink_to("b")
    (tmp_path / "next").replace(link)
    assert number.current() == ord("b")


def test_a_broken_file_leaves_the_value(
    number: Reloading[int], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged as an error once, not at every look; a sound one counts again."""
    with caplog.at_level(logging.INFO):
        replace(path, "many")
        assert [number.current() for _ in range(3)] == [1, 1, 1]
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert [record.message for record in errors] == ["files_refused"]
        assert "many" in errors[0].__dict__["reason"]
        replace(path, "5")
        assert number.current() == 5
        assert caplog.records[-1].message == "files_reloaded"


def test_a_file_that_is_gone_leaves_the_value(number: Reloading[int], path: Path) -> None:
    """And is read again when it is back."""
    path.unlink()
    assert number.current() == 1
    path.write_text("7")
    assert number.current() == 7


def test_nothing_is_read_while_nothing_changes(path: Path) -> None:
    """A look is cheap; a touched file with the same content gives the same object."""
    reads: list[str] = []

    def load() -> list[str]:
        reads.append(path.read_text())
        return [reads[-1]]

    value = Reloading((path,), load)
    first = value.current()
    assert value.current() is first
    assert len(reads) == 1
    os.utime(path, ns=(0, 0))
    assert value.current() is first
    assert len(reads) == 2


def test_the_first_value_must_be_sound(path: Path) -> None:
    """There is nothing yet to fall back on."""
    path.write_text("none")
    with pytest.raises(ValueError, match="none"):
        Reloading((path,), lambda: int(path.read_text()))
