"""Admission: preempted groups come back first, then new ones, in order of their keys.

Nothing new is admitted while a preempted group of the same or a higher key waits: it
has had its turn in line already.
"""

from __future__ import annotations

from scheduler_svc.core import preemption, prefill
from scheduler_svc.core.cost import CostModel
from scheduler_svc.core.events import Blocked, EventKind
from scheduler_svc.core.sequence import GroupStatus, Sequence, SequenceGroup
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.errors import QueueFull

_MIN_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 30.0


def admit(state: SchedulerState, budget: int, now: float) -> None:
    """Bring groups back and let new ones in while budget, rows and blocks last."""
    while budget > 0:
        group = _next(state)
        if group is None:
            return
        if _is_quarantined(state, group):
            _note_blocked(state, group, Blocked.SUSPECT)
            return
        if group.status is GroupStatus.SWAPPED:
            if not _swap_in(state, group):
                return
            continue
        if _awaits_samples(state, group):
            return
        if not _fits(state, group):
            _note_blocked(state, group, _lack(state, group))
            return
        _enter(state, group, now)
        for seq in list(group.live):
            if seq.row is None and budget > 0:
                budget -= prefill.prefill_chunk(state, seq, budget)
        state.prefilling = _in_order(state, group)
    if state.preempted or len(state.waiting):
        group = _next(state)
        if group is not None and group.blocked is None:
            _note_blocked(state, group, Blocked.BUDGET)


def check_queue(
    state: SchedulerState, now: float, priority: int, group: SequenceGroup | None = None
) -> None:
    """Refuse early what would wait too long, before it costs anybody anything.

    Args:
        now: seconds, on the clock of arrivals.
        priority: of what would wait.
        group: that would; None: as small a one as there can be.
    Raises:  QueueFull: with the wait that is expected.
    """
    num_waiting, config = len(state.waiting), state.config
    is_full = num_waiting >= config.max_queue
    if not is_full and not config.max_queue_seconds:
        return
    wait = _expected_wait(state, now, priority, group)
    is_slow = wait is not None and 0 < config.max_queue_seconds < wait
    if not is_full and not is_slow:
        return
    expected = "" if wait is None else f", which takes about {wait:.1f} s"
    delay = min(max(wait or 0.0, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
    raise QueueFull(f"{num_waiting} requests are waiting{expected}", retry_seconds=delay)


def _expected_wait(
    state: SchedulerState, now: float, priority: int, group: SequenceGroup | None
) -> float | None:
    """Seconds until a group that comes now has a place; None if too little was seen."""
    is_ranked = state.config.policy != "fcfs"
    if is_ranked and state.running and state.running[-1].request.priority < priority:
        return 0.0  # it will take the place of one of a lower priority
    first = _next(state)
    num_ahead = len(state.waiting) + len(state.preempted)
    if first is None or (is_ranked and first.request.priority < priority):
        num_ahead = 0
    # Those ahead take as much as it does, for all that is known.
    num_free = state.num_unpromised_rows
    if group is not None:
        num_blocks = state.blocks.pool.num_available - _held_back(state)
        num_blocks += state.blocks.num_becoming_available()
        by_blocks = num_blocks // max(1, _blocks_needed(state, group))
        num_free = min(num_free // max(1, group.max_rows), by_blocks)
    if num_ahead < num_free:
        return 0.0
    begun = [g.admitted_at for g in state.running if g.admitted_at is not None]
    return state.queue_wait.estimate(num_ahead - max(0, num_free), now, begun)


def misfit(state: SchedulerState, group: SequenceGroup) -> str | None:
    """Say why the group could not run even alone; None if it could."""
    needed, total = state.blocks.worst_case(group), state.config.num_blocks
    if needed > total:
        return (
            f"prompt of {len(group.request.prompt_tokens)} tokens with max_tokens "
            f"{group.request.max_tokens} needs {needed} KV blocks at its longest; "
            f"the whole pool has {total} of {state.config.block_size} tokens"
        )
    if group.max_rows > state.config.max_num_seqs:
        return f"{group.max_rows} sequences at once; max_num_seqs is {state.config.max_num_seqs}"
    return None


def make_room_for_urgent(state: SchedulerState, costs: CostModel) -> None:
    """Preempt running groups of a lower priority than the next one in line."""
    group = _next(state)
    if group is None or state.config.policy == "fcfs" or _is_quarantined(state, group):
        return
    last_in_line = [groups[-1] for groups in (state.running, state.preempted) if groups]
    if all(last.request.priority >= group.request.priority for last in last_in_line):
        return
    rows = 0 if group.status is GroupStatus.SWAPPED else group.max_rows
    if not _victims_would_do(state, group, rows):
        return
    preemption.free_rows_of_swapped(state, rows, group)
    while state.running and not _fits(state, group, fences_lifted=True):
        victim = state.running[-1]
        if victim.request.priority >= group.request.priority:
            return
        keep_rows = rows <= state.num_unpromised_rows
        preemption.preempt(state, victim, costs, by=group, keep_rows=keep_rows)


def _victims_would_do(state: SchedulerState, group: SequenceGroup, num_rows: int) -> bool:
    """Say whether all groups of a lower priority together hold enough: else none is preempted.

    An upper bound: blocks that they share with others are counted as if they came free.
    """
    below = group.request.priority
    num_rows -= state.num_unpromised_rows
    num_blocks = _blocks_needed(state, group)
    num_blocks -= state.blocks.pool.num_available + state.blocks.num_becoming_available()
    for victim in reversed(state.running):
        if (num_rows <= 0 and num_blocks <= 0) or victim.request.priority >= below:
            break
        num_rows -= victim.rows_promised
        num_blocks -= sum(len(seq.block_table) for seq in victim.live)
    for victim in reversed(state.preempted):
        if num_rows <= 0 or victim.request.priority >= below:
            break
        num_rows -= victim.rows_promised
    return num_rows <= 0 and num_blocks <= 0


def _next(state: SchedulerState) -> SequenceGroup | None:
    waiting = state.waiting.peek()
    if not state.preempted:
        return waiting
    first = state.preempted[0]
    if waiting is not None and waiting.request.priority > first.request.priority:
        return waiting if state.config.policy != "fcfs" else first
    return first


def _is_quarantined(state: SchedulerState, group: SequenceGroup) -> bool:
    """Of those suspected of a failed step one runs at a time, so that a second tells."""
    return group in state.suspects and any(g in state.suspects for g in state.running)


def _awaits_samples(state: SchedulerState, group: SequenceGroup) -> bool:
    """Samples of its rows from before it was preempted are still in flight."""
    return bool(state.in_flight) and state.in_flight[0].step_id <= group.resume_after


def _blocks_needed(state: SchedulerState, group: SequenceGroup) -> int:
    """Blocks that the group takes until all its known tokens are computed."""
    blocks = state.blocks
    if group.status is GroupStatus.SWAPPED:
        return blocks.num_to_swap_in(group)
    live = group.live
    needed = sum(blocks.blocks_for(len(seq.tokens)) for seq in live)
    shared = min(len(seq.tokens) - 1 for seq in live)
    shared = min(shared, live[0].num_prompt_tokens) // blocks.block_size
    needed -= shared * (len(live) - 1)
    if group.unforked and len(live[0].tokens) % blocks.block_size:
        needed += group.unforked
    if group.uses_cache:
        hits = blocks.match_prefix(live[0])
        needed -= len(hits) - blocks.num_idle(hits)
    return needed


def _fits(state: SchedulerState, group: SequenceGroup, *, fences_lifted: bool = False) -> bool:
    """Say whether rows and blocks are there now, or once the steps in flight are over."""
    if group.status is not GroupStatus.SWAPPED and group.max_rows > state.num_unpromised_rows:
        return False
    available = state.blocks.pool.num_available - _held_back(state)
    if fences_lifted:
        available += state.blocks.num_becoming_available()
    return _blocks_needed(state, group) <= available


def _lack(state: SchedulerState, group: SequenceGroup) -> Blocked:
    if group.status is not GroupStatus.SWAPPED and group.max_rows > state.num_unpromised_rows:
        return Blocked.ROWS
    return Blocked.BLOCKS


def _note_blocked(state: SchedulerState, group: SequenceGroup, why: Blocked) -> None:
    """Tell why the next in line is not let in, whenever the reason changes."""
    if group.blocked is why:
        return
    group.blocked = why
    detail = why.value
    if why is Blocked.ROWS:
        free = state.num_unpromised_rows
        detail += f": {group.max_rows} more do not fit beside {state.num_promised_rows}"
        detail += f", {free} of {state.config.max_num_seqs} are left"
    elif why is Blocked.BLOCKS:
        available = state.blocks.pool.num_available
        detail += f": it needs {_blocks_needed(state, group)} of {available} free or cached"
        detail += f", {_held_back(state)} of which are kept for those that run"
    holder = max(state.running, key=_num_blocks_held, default=None)
    state.note(EventKind.BLOCKED, group, by=holder, detail=detail)


def _num_blocks_held(group: SequenceGroup) -> int:
    return sum(len(seq.block_table) for seq in group.live)


def _held_back(state: SchedulerState) -> int:
    """Blocks promised to running groups, and the watermark; nothing if none runs."""
    if not state.running:
        return 0
    watermark = int(state.config.watermark * state.config.num_blocks)
    return prefill.blocks_to_come(state) + state.num_owed_blocks + watermark


def _enter(state: SchedulerState, group: SequenceGroup, now: float) -> None:
    if group.status is GroupStatus.WAITING:
        state.dequeue()
        group.admitted_at = now
        state.outcome.admitted.append(group)
        state.queue_wait.note_admission(now)
    else:
        state.preempted.remove(group)
        known = sum(len(seq.tokens) for seq in group.live)
        state.note(EventKind.RESUMED, group, num_tokens=known)
    group.blocked = None
    if group.uses_cache:
        leader = group.live[0]
        hits = len(state.blocks.match_prefix(leader)) * state.blocks.block_size
        state.counters.num_prefix_query_tokens += len(leader.tokens)
        state.counters.num_prefix_hit_tokens += hits
        if group.num_preemptions == 0:
            group.cached_prompt_tokens = min(hits, leader.num_prompt_tokens)
    state.promise_rows(group, group.max_rows)
    state.enter_running(group)


def _swap_in(state: SchedulerState, group: SequenceGroup) -> bool:
    if state.plan.swap_out_host_blocks:
        return False  # blocks go one way in a step; the group may be on its way out itself
    if not _fits(state, group):
        if state.running or state.in_flight or state.blocks.num_fenced:
            _note_blocked(state, group, Blocked.BLOCKS)
            return False
        # Alone, and still no room: cannot be, since what was out fits the empty pool.
        preemption.fall_back_to_recompute(state, group, by=group)
        return False
    plan = state.plan
    host, device = state.blocks.swap_in(group, fence=plan.step_id)
    plan.swap_in_host_blocks += host
    plan.swap_in_device_blocks += device
    state.preempted.remove(group)
    state.enter_running(group)
    group.blocked = None
    num_tokens = sum(seq.num_scheduled for seq in group.live)
    state.note(EventKind.SWAPPED_IN, group, num_tokens=num_tokens)
    for seq in group.live:
        if seq.row is not None:
            plan.tables.append((seq.row, list(seq.block_table)))
        if seq.is_prefilled:
            prefill.await_decode(state, seq)
    state.prefilling = _in_order(state, group)
    return True


def _in_order(state: SchedulerState, group: SequenceGroup) -> list[Sequence]:
    """Partial prefills with the group's own, by key."""
    known = set(map(id, state.prefilling))
    mine = [s for s in group.live if not s.is_prefilled and id(s) not in known]
    return sorted([*state.prefilling, *mine], key=lambda s: s.group.key)
