"""Every interleaving of schedulers that claim one executor, not a sample of them.

A scheduler asks for the epoch, claims a higher one, sends plans, leaves, is stopped between any
two of these, and may claim again. A connection may be cut at any time, and each end notices
whenever it does; until then the scheduler goes on as if it owned the executor, and what the
executor has received is still carried out.

States that were seen already are not entered again, so what is said here is said of all orders
of events up to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from executor_svc.ownership import Fence, Lease, Ownership
from tests.support.claim_world import Scheduler, Size, World
from tests.support.core_harness import TOTALS

_SIZES = {
    "two": Size(2, 1, 2, 0),
    "two-cut": Size(2, 1, 1, 1),
    "two-again": Size(2, 2, 1, 0),
    "three": Size(3, 1, 0, 1),
}
_LARGE = {
    "three-plans": Size(3, 1, 1, 0),
    "two-cut-long": Size(2, 1, 2, 1),
    "two-cut-twice": Size(2, 1, 1, 2),
    "two-again-cut": Size(2, 2, 1, 1),
}


@pytest.mark.parametrize("size", _SIZES)
def test_no_interleaving_lets_two_schedulers_in(size: str) -> None:
    """At any time the plans of one stream at most are applied; none of an older epoch is once
    a higher one was claimed; a new owner finds no rows; who lost the executor learns of it;
    and from every state somebody can claim it.
    """
    _search(size, _SIZES[size])


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("size", _LARGE)
def test_no_longer_interleaving_does_either(size: str) -> None:
    """The same with more claims and more plans."""
    _search(size, _LARGE[size])


def _let_all_through(self: Fence, epoch: int) -> None:
    """Planted: the device looks at no epoch."""


def _tell_nobody(self: Lease, reason: Exception) -> None:
    """Planted: who is robbed is not told."""


def _free_for_anybody(self: Ownership, lease: Lease) -> None:
    """Planted: a stream that ends late takes the lease of another along."""
    self.lease = None


_FAULTS: dict[str, tuple[type, str, Callable[..., None], str]] = {
    "no fence": (Fence, "check", _let_all_through, "a plan of epoch 1 is applied, 2 was claimed"),
    "no word": (Lease, "end", _tell_nobody, "never learns"),
    "no look": (Ownership, "release", _free_for_anybody, "never learns"),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_the_search_finds_a_planted_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one of the rules something goes wrong somewhere, and it is found."""
    owner, name, planted, complaint = _FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises(AssertionError, match=complaint):
        _search(fault, _SIZES["two"])


def _search(title: str, size: Size) -> None:
    """Enter every state there is, and check each."""
    first = World(size, [Scheduler() for _ in range(size.num_schedulers)])
    came_from: dict[Hashable, tuple[Hashable, tuple[str, object]] | None] = {first.key(): None}
    frontier, num_transitions = [first], 0
    while frontier:
        world = frontier.pop()
        before = world.key()
        for step in (*world.moves(), *world.happenings(), *world.cuts()):
            num_transitions += 1
            after = world.clone()
            try:
                name, where = step
                getattr(after, name)(where)
                key = after.key()
                if key in came_from:
                    continue
                came_from[key] = (before, step)
                frontier.append(after)
                # What happens by itself comes to an end, and that state is entered, too.
                if next(after.happenings(), None) is None:
                    after.check_settled()
                    after.clone().check_claimable()
            except Exception as error:
                error.add_note(f"after {[*_path(came_from, before), step]}")
                raise
    TOTALS.notes.append(
        f"claims of {title}: all {len(came_from):,} states, {num_transitions:,} transitions"
    )


def _path(
    came_from: dict[Hashable, tuple[Hashable, tuple[str, object]] | None], key: Hashable
) -> list[tuple[str, object]]:
    steps: list[tuple[str, object]] = []
    while (link := came_from[key]) is not None:
        key, step = link
        steps.append(step)
    return steps[::-1]
