"""Make room: who gives blocks back so that others can grow, and how.

Room is made before anything of a step is scheduled, so a victim is never half in the
step. Victims go from the largest key down (lowest priority, then newest), a group at a
time. Blocks given back while steps are in flight are fenced, so preempting more would
not help sooner: who needs them then stalls for a step instead.

The group with the smallest key is never a victim of another one, and `Scheduler.add`
refuses groups that could not fit alone: so it always gets on, and everyone after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_svc.core.cost import CostModel
from scheduler_svc.core.events import EventKind
from scheduler_svc.core.sequence import GroupStatus, Sequence, SequenceGroup
from scheduler_svc.core.state import SchedulerState


@dataclass(slots=True)
class Room:
    """Who may grow in this step, who must stall, and the blocks that growing takes.

    A group is in one of the lists as a whole; who was preempted is in neither, or has
    left RUNNING since. `num_owed_blocks` is the part of `num_blocks` that is kept for
    those who stall.
    """

    granted: list[Sequence] = field(default_factory=list)
    stalled: list[Sequence] = field(default_factory=list)
    num_blocks: int = 0
    num_owed_blocks: int = 0


def make_room_to_grow(
    state: SchedulerState, candidates: Iterable[Sequence], costs: CostModel
) -> Room:
    """Decide which sequences can grow, preempting others for them.

    Args:
        candidates: sequences whose next decode needs a block, a copy, or a place in
            the decode set.
    """
    candidates = list(candidates)
    if len(candidates) <= state.blocks.pool.num_available:
        return Room(granted=candidates, num_blocks=len(candidates))  # a block each, at most
    by_group: dict[SequenceGroup, list[Sequence]] = {}
    for seq in candidates:
        by_group.setdefault(seq.group, []).append(seq)
    room = Room()
    for group in sorted(by_group, key=lambda g: g.key):
        if group.status is not GroupStatus.RUNNING:
            continue  # a victim of one before it
        needed = state.blocks.num_to_grow(by_group[group])
        if make_room(state, group, room.num_blocks + needed, costs):
            room.granted += by_group[group]
        elif group.status is GroupStatus.RUNNING:
            room.stalled += by_group[group]
            room.num_owed_blocks += needed
        else:
            continue
        room.num_blocks += needed
    return room


def make_room(
    state: SchedulerState, group: SequenceGroup, num_blocks: int, costs: CostModel
) -> bool:
    """Preempt from the back of the line until `num_blocks` are available.

    Returns: whether they are. If not, either they will be when the steps in flight are
        acknowledged, or `group` itself was last in line and has been preempted.
    """
    while state.blocks.pool.num_available < num_blocks:
        coming = state.blocks.num_becoming_available()
        if state.blocks.pool.num_available + coming >= num_blocks:
            return False
        victim = state.running[-1]
        preempt(state, victim, costs, by=group)
        if victim is group:
            return False
    return True


def preempt(
    state: SchedulerState,
    group: SequenceGroup,
    costs: CostModel,
    *,
    by: SequenceGroup,
    keep_rows: bool = True,
) -> None:
    """Take all blocks from a group, by swap or by recompute; it keeps its place in line.

    Args:
        by: who needs them; may be the group itself, which is last in line then.
        keep_rows: swapping is allowed; a swapped group keeps its rows.
    """
    state.leave_running(group)
    group.num_preemptions += 1
    num_tokens = sum(seq.num_scheduled for seq in group.live)
    if keep_rows and _should_swap(state, group, costs):
        _swap_out(state, group)
        kind = EventKind.PREEMPTED_SWAP
    else:
        _give_up(state, group)
        kind = EventKind.PREEMPTED_RECOMPUTE
    detail = "there was no block for it to grow, and it is last in line" if by is group else ""
    state.note(kind, group, by=by, detail=detail, num_tokens=num_tokens)
    state.enqueue_preempted(group)


def _should_swap(state: SchedulerState, group: SequenceGroup, costs: CostModel) -> bool:
    if state.config.preemption == "recompute" or not state.blocks.can_swap_out(group):
        return False
    if group.beam is not None and group.has_pending:
        return False  # its next step rearranges tables that would be on the way out
    if not any(seq.block_table for seq in group.live):
        return False
    return state.config.preemption == "swap" or costs.prefers_swap(
        num_tokens=sum(seq.num_scheduled for seq in group.live),
        num_blocks=len({b for seq in group.live for b in seq.block_table}),
    )


def _swap_out(state: SchedulerState, group: SequenceGroup) -> None:
    plan = state.plan
    for seq in group.live:
        state.leave_decode_set(seq)
    device, host = state.blocks.swap_out(group, fence=plan.step_id)
    plan.swap_out_device_blocks += device
    plan.swap_out_host_blocks += host
    group.status = GroupStatus.SWAPPED
    state.counters.num_swap_preemptions += len(group.live)


def _give_up(state: SchedulerState, group: SequenceGroup) -> None:
    # The plan under construction may be the one that swaps the group out.
    is_moving = group.status is GroupStatus.SWAPPED and state.plan.swap_out_host_blocks
    fence = state.plan.step_id if is_moving else state.fence
    for seq in group.live:
        state.leave_decode_set(seq, row_goes_on=False)
        state.withdraw(seq)
        state.blocks.free(seq, fence)
        state.give_row_back(seq)
        seq.restart()
    if group.beam is not None:
        group.beam.candidates.clear()
    state.promise_rows(group, 0)
    group.status = GroupStatus.PREEMPTED
    group.resume_after = state.fence or 0
    state.counters.num_recompute_preemptions += len(group.live)


def fall_back_to_recompute(
    state: SchedulerState, group: SequenceGroup, *, by: SequenceGroup
) -> None:
    """Give up a swapped group's host blocks and rows; it will compute its tokens again."""
    assert group.status is GroupStatus.SWAPPED
    num_tokens = sum(seq.num_scheduled for seq in group.live)
    _give_up(state, group)
    state.note(
        EventKind.PREEMPTED_RECOMPUTE,
        group,
        by=by,
        detail="it had been swapped out, and gave up its rows as well",
        num_tokens=num_tokens,
    )


def free_rows_of_swapped(state: SchedulerState, num_rows: int, urgent: SequenceGroup) -> None:
    """Let swapped groups of a lower priority give up rows until an urgent one has enough."""
    for group in reversed(state.preempted):
        if state.num_unpromised_rows >= num_rows:
            return
        is_below = group.request.priority < urgent.request.priority
        if group.status is GroupStatus.SWAPPED and is_below:
            fall_back_to_recompute(state, group, by=urgent)
