"""Prefill in chunks under the step's token budget, and the forks at its end.

A running group's sequences are continued in the order of the groups' keys, before
anything new is admitted. A sequence starts (gets its row, and blocks that it can share)
with its first chunk.
"""

from __future__ import annotations

from scheduler_svc.core.block_pool import BlockId
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step import RowStart


def prefill(state: SchedulerState, budget: int) -> int:
    """Continue all partial prefills.

    Args:
        budget: tokens that the step may still compute.
    Returns: what is left of it.
    """
    remaining: list[Sequence] = []
    for seq in state.prefilling:
        if budget > 0:
            budget -= prefill_chunk(state, seq, budget)
        if not seq.is_prefilled:
            remaining.append(seq)
    state.prefilling = remaining
    return budget


def prefill_chunk(state: SchedulerState, seq: Sequence, budget: int) -> int:
    """Schedule the sequence's next chunk, as long as budget and blocks allow.

    Returns: tokens scheduled; 0 if no block was available, and then the sequence is
        noted as starved, so that the next plan makes room for it.
    """
    if seq.row is None and not _start(state, seq):
        return 0
    assert seq.row is not None
    count = min(len(seq.tokens) - seq.num_scheduled, budget)
    count = min(count, _room_for(state, seq))
    if count == 0:
        if state.starved is None:
            state.starved = seq
        return 0
    plan = state.plan
    growth = state.blocks.grow(seq, count, plan.step_id)
    assert growth.copied is None, "a prefill writes to no shared block"
    if not any(start.sequence is seq for start in plan.starts):
        plan.append_rows += [seq.row] * len(growth.appended)
        plan.append_blocks += growth.appended
    plan.chunk_rows.append(seq.row)
    plan.chunk_counts.append(count)
    state.chunks.append((seq, seq.num_scheduled, count))
    seq.num_scheduled += count
    if seq.num_scheduled == len(seq.tokens):
        _complete(state, seq)
    return count


def blocks_to_come(state: SchedulerState) -> int:
    """Blocks that the partial prefills of running groups have still to take."""
    return sum(
        max(0, state.blocks.blocks_for(len(s.tokens)) - len(s.block_table))
        for s in state.prefilling
    )


def _room_for(state: SchedulerState, seq: Sequence) -> int:
    block_size = state.blocks.block_size
    available = max(0, state.blocks.pool.num_available - state.num_owed_blocks)
    return (len(seq.block_table) + available) * block_size - seq.num_scheduled


def _start(state: SchedulerState, seq: Sequence) -> bool:
    """Give the sequence a row and what it can share; False: a sibling must go first."""
    shared = shareable_blocks(state, seq)
    if shared is None:
        return False
    state.take_row(seq)
    state.blocks.adopt(seq, shared)
    seq.num_registered = len(shared)
    seq.num_scheduled = seq.num_computed = len(shared) * state.blocks.block_size
    seq.share_from = None
    state.plan.starts.append(RowStart(seq.row or 0, [], seq.num_scheduled, [], seq))
    return True


def shareable_blocks(state: SchedulerState, seq: Sequence) -> list[BlockId] | None:
    """Blocks that already hold the start of the sequence, or will by this very step.

    A group that comes back starts its sequences one after another: the first computes
    the prompt, the others share its full blocks as soon as they are scheduled (within
    a step, all K/V of a layer are written before any are read).

    Returns: the blocks; None if a sibling is about to compute them.
    """
    hits: list[BlockId] = []
    if seq.group.uses_cache:
        hits = state.blocks.match_prefix(seq)
    started = [s for s in seq.group.live if s.row is not None]
    if started:
        leader = max(started, key=lambda s: s.num_scheduled)
        last = len(seq.tokens) - 1  # it must be computed to sample
        shared = min(seq.num_prompt_tokens, last) // state.blocks.block_size
        if shared > len(hits):
            if leader.num_scheduled < shared * state.blocks.block_size:
                return None
            return leader.block_table[:shared]
    return hits


def _complete(state: SchedulerState, seq: Sequence) -> None:
    """All known tokens are scheduled: this step samples, and other samples fork off."""
    group = seq.group
    while group.unforked:
        child = Sequence(group, len(group.sequences), list(seq.tokens))
        group.sequences.append(child)
        group.unforked -= 1
        state.take_row(child)
        state.blocks.fork(seq, child)
        child.num_scheduled, child.num_computed = seq.num_scheduled, seq.num_computed
        state.plan.forks.append((seq.row or 0, child.row or 0, child.sample_index))
        state.sampling.append(child)
        await_decode(state, child)
    state.sampling.append(seq)
    await_decode(state, seq)


def await_decode(state: SchedulerState, seq: Sequence) -> None:
    """Let the sequence into the decode set with the next plan, unless it is at its length."""
    seq.is_prefilled = True
    waits_for_search = seq.group.beam is not None and seq.num_pending > 0
    if not waits_for_search and seq.num_scheduled < seq.limit:
        state.ready.append(seq)
