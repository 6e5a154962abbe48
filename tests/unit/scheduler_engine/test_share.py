"""Each scheduler counts its share alone; together they hold every executor once."""

from __future__ import annotations

import itertools

from scheduler_svc.share import fair_share


def test_shares_add_up() -> None:
    """Whatever is held by whom, equal views give shares of equal size that sum to all."""
    names = ["a", "b", "c"]
    for num_executors in range(6):
        for owners in itertools.product(["", *names], repeat=num_executors):
            shares = [fair_share(name, owners, names) for name in names]
            assert sum(shares) == num_executors
            assert max(shares) - min(shares) <= 1


def test_who_holds_keeps() -> None:
    """What cannot be shared equally stays where it is."""
    assert fair_share("b", ["b"], ["a", "b"]) == 1
    assert fair_share("a", ["b"], ["a", "b"]) == 0
    assert fair_share("b", ["b", "b", "a"], ["a", "b"]) == 2


def test_a_newcomer_gets_its_part() -> None:
    """The first holder's share shrinks when another scheduler asks."""
    assert fair_share("first", ["first"] * 4, ["first"]) == 4
    assert fair_share("first", ["first"] * 4, ["first", "second"]) == 2
    assert fair_share("second", ["first"] * 4, ["first", "second"]) == 2


def test_an_owner_counts_as_alive() -> None:
    """Even if it has not asked lately: its stream lives."""
    assert fair_share("a", ["b", ""], ["a"]) == 1


def test_alone_with_nothing() -> None:
    """No executor answers yet."""
    assert fair_share("a", [], []) == 0
