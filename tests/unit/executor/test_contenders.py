"""Who asks for an executor: names that expire, in bounded number."""

from __future__ import annotations

import pytest

from executor_svc.contenders import EXPIRY_SECONDS, MAX_NAMES, Contenders


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def contenders(clock: Clock) -> Contenders:
    return Contenders(clock)


def test_names_are_sorted_and_told_once(contenders: Contenders) -> None:
    """However often and in whatever order they asked; nobody in particular is nobody."""
    for name in ("b", "a", "", "b"):
        contenders.note(name)
    assert contenders.names("") == ["a", "b"]


def test_a_name_expires(contenders: Contenders, clock: Clock) -> None:
    """It stands for five seconds after it asked last, and not longer."""
    contenders.note("a")
    clock.now += 3
    contenders.note("b")
    contenders.note("c")
    clock.now += 2
    assert contenders.names("") == ["a", "b", "c"]
    contenders.note("b")
    clock.now += 3.5
    assert contenders.names("") == ["b"]
    clock.now += EXPIRY_SECONDS
    assert contenders.names("") == []


def test_the_owner_counts_while_it_owns(contenders: Contenders, clock: Clock) -> None:
    """Whether or not it asked, and once only."""
    contenders.note("b")
    assert contenders.names("a") == ["a", "b"]
    assert contenders.names("b") == ["b"]
    clock.now += 100
    assert contenders.names("a") == ["a"]
    assert contenders.names("") == []


def test_who_is_gone_is_forgotten_until_it_asks_again(contenders: Contenders) -> None:
    """Of others nothing is forgotten, and to forget a stranger does no harm."""
    contenders.note("a")
    contenders.note("b")
    contenders.forget("a")
    contenders.forget("stranger")
    assert contenders.names("") == ["b"]
    contenders.note("a")
    assert contenders.names("") == ["a", "b"]


def test_the_oldest_make_room(contenders: Contenders, clock: Clock) -> None:
    """Those that asked longest ago are dropped, not those that came first."""
    names = [f"s{number:03}" for number in range(MAX_NAMES)]
    for name in names:
        clock.now += 0.01
        contenders.note(name)
    contenders.note(names[0])
    contenders.note("z")
    assert contenders.names("") == [names[0], *names[2:], "z"]
