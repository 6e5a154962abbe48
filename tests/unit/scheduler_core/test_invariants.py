"""The check that everything else relies on: it notices each kind of damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from scheduler_svc.core import invariants
from scheduler_svc.core.sequence import GroupStatus
from scheduler_svc.core.state import SchedulerState
from tests.support.core_builders import make_harness, make_request


def _leak(state: SchedulerState) -> None:
    state.blocks.pool.allocate()


def _share_unnoticed(state: SchedulerState) -> None:
    a, b = state.running[0].live[0], state.running[1].live[0]
    b.block_table[0] = a.block_table[0]


def _lose_a_row(state: SchedulerState) -> None:
    state.free_rows.pop()


def _promise_too_little(state: SchedulerState) -> None:
    state.promise_rows(state.running[0], 0)


def _run_ahead(state: SchedulerState) -> None:
    state.running[0].live[0].num_computed += 9


def _outgrow_the_table(state: SchedulerState) -> None:
    seq = state.running[0].live[0]
    seq.tokens += [0] * 60
    seq.max_len = 500
    seq.num_scheduled += 60


def _forget_a_horizon(state: SchedulerState) -> None:
    state.due.clear()


def _be_in_two_places(state: SchedulerState) -> None:
    state.ready.append(state.decode_set.members[0])


def _disorder(state: SchedulerState) -> None:
    state.running.reverse()


def _hold_blocks_while_out(state: SchedulerState) -> None:
    group = state.running.pop()
    for seq in group.live:
        state.leave_decode_set(seq)
    group.status = GroupStatus.PREEMPTED
    state.preempted.append(group)


_DAMAGES: list[Callable[[SchedulerState], None]] = [
    _leak,
    _share_unnoticed,
    _lose_a_row,
    _promise_too_little,
    _run_ahead,
    _outgrow_the_table,
    _forget_a_horizon,
    _be_in_two_places,
    _disorder,
    _hold_blocks_while_out,
]


@pytest.mark.parametrize("damage", _DAMAGES, ids=lambda damage: damage.__name__[1:])
def test_damage_is_noticed(damage: Callable[[SchedulerState], None]) -> None:
    """A state that was in order before fails the check afterwards."""
    harness = make_harness()
    harness.add(make_request("a", 6))
    harness.add(make_request("b", 6, arrival=1.0))
    harness.step()
    harness.step()
    state = harness.core.state
    invariants.check(state)
    damage(state)
    with pytest.raises(AssertionError):
        invariants.check(state)
