"""The core's invariants, written once and checked by tests after every transition."""

from __future__ import annotations

from scheduler_svc.core.sequence import GroupStatus, Sequence
from scheduler_svc.core.state import SchedulerState


def check(state: SchedulerState) -> None:
    """Assert everything that must hold between any two calls of the scheduler.

    Raises:  AssertionError: naming what does not hold.
    """
    sequences = [seq for group in state.groups.values() for seq in group.live]
    _check_blocks(state, sequences)
    _check_rows(state, sequences)
    _check_places(state, sequences)
    _check_load(state)
    for seq in sequences:
        _check_counts(state, seq)


def _check_blocks(state: SchedulerState, sequences: list[Sequence]) -> None:
    pool = state.blocks.pool
    assert pool.num_free + pool.num_cached + pool.num_referenced == pool.num_total
    state.blocks.check(sequences)
    if not state.in_flight:
        assert state.blocks.num_fenced == 0, "a fence outlived the steps in flight"
    for seq in sequences:
        status = seq.group.status
        if status is not GroupStatus.RUNNING:
            assert not seq.block_table, f"{seq} holds device blocks while {status}"
        if status is not GroupStatus.SWAPPED:
            assert not seq.host_table, f"{seq} holds host blocks while {status}"


def _check_rows(state: SchedulerState, sequences: list[Sequence]) -> None:
    held = [seq.row for seq in sequences if seq.row is not None]
    assert len(set(held)) == len(held), "two sequences hold one row"
    assert sorted([*held, *state.free_rows]) == list(range(state.config.max_num_seqs))
    promised = sum(group.rows_promised for group in state.groups.values())
    assert promised == state.num_promised_rows <= state.config.max_num_seqs
    for group in state.groups.values():
        rows = sum(seq.row is not None for seq in group.live)
        assert rows <= group.rows_promised, f"{group.request.request_id} has rows unpromised"


def _check_places(state: SchedulerState, sequences: list[Sequence]) -> None:
    running = {g for g in state.groups.values() if g.status is GroupStatus.RUNNING}
    waiting = {g for g in state.groups.values() if g.status is GroupStatus.WAITING}
    assert set(state.running) == running and len(state.running) == len(running)
    assert len(state.waiting) == len(waiting)
    assert set(state.preempted) == set(state.groups.values()) - running - waiting
    assert [g.key for g in state.running] == sorted(g.key for g in state.running)
    assert [g.key for g in state.preempted] == sorted(g.key for g in state.preempted)
    decoding = [s for s in state.decode_set.members if s.in_decode_set]
    assert decoding == [s for s in sequences if s.in_decode_set] or set(decoding) == {
        s for s in sequences if s.in_decode_set
    }
    rows = [s.row for s in decoding]
    assert rows == sorted(r for r in rows if r is not None), "the decode set is not by row"
    for seq in decoding:
        step = state.clock.num_steps + seq.horizon - seq.num_scheduled
        assert seq in state.due.get(step, ()), f"{seq} would run over its horizon"
    for seq in [*state.prefilling, *state.ready, *decoding]:
        assert seq.group in running and not seq.is_finished, f"{seq} is listed but not running"
    places = [*state.prefilling, *state.ready, *decoding]
    assert len(set(places)) == len(places), "a sequence is in two places"


def _check_load(state: SchedulerState) -> None:
    groups = state.groups.values()
    waiting = [g for g in groups if g.status is GroupStatus.WAITING]
    assert state.num_waiting_tokens == sum(g.num_uncached_tokens for g in waiting)
    assert state.num_output_tokens == sum(g.num_output_tokens_at_most for g in groups)
    decoding = [s for g in groups for s in g.live if s.in_decode_set]
    assert state.num_decoding == len(decoding)
    drawn = state.num_drawn_at_zero + state.num_decoding * state.clock.num_steps
    assert drawn == sum(s.num_scheduled - s.num_prompt_tokens for s in decoding)
    assert state.load_tokens >= 0
    assert groups or state.load_tokens == 0


def _check_counts(state: SchedulerState, seq: Sequence) -> None:
    assert 0 <= seq.num_computed <= seq.num_scheduled, f"{seq}: computed more than scheduled"
    assert seq.num_scheduled <= len(seq.tokens) + seq.num_pending
    assert seq.num_pending <= state.config.max_steps_in_flight + 1
    assert len(seq.tokens) <= max(seq.max_len, seq.num_prompt_tokens)
    if seq.block_table:
        capacity = len(seq.block_table) * state.blocks.block_size
        assert seq.num_scheduled <= capacity, f"{seq}: tokens beyond its table"
