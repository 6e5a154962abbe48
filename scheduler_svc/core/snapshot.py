"""The state between two steps, counted: what operators see of the pool."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.block_pool import BlockId
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.state import SchedulerState


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by place, and slots of referenced blocks by use.

    `reserved_slots` and `external_waste_slots` of other designs are 0 here by
    construction: blocks are allocated on demand, and any free block serves anyone.
    """

    num_total: int
    num_free: int
    num_cached: int
    num_referenced: int
    num_shared: int
    num_fenced: int
    num_host_total: int
    num_host_free: int
    live_slots: int
    internal_waste_slots: int


def count_pool(state: SchedulerState) -> PoolCounts:
    """Count blocks and slots; exact also where sequences share a partial block."""
    pool, host = state.blocks.pool, state.blocks.host_pool
    block_size = state.blocks.block_size
    used: dict[BlockId, int] = {}
    for group in state.running:
        for seq in group.sequences:
            for logical, block in enumerate(seq.block_table):
                filled = min(block_size, max(0, seq.num_scheduled - logical * block_size))
                used[block] = max(used.get(block, 0), filled)
    live = sum(used.values())
    fenced = set(state.blocks.fenced_blocks())
    return PoolCounts(
        num_total=pool.num_total,
        num_free=pool.num_free,
        num_cached=pool.num_cached,
        num_referenced=pool.num_referenced,
        num_shared=sum(count > 1 for count in pool.ref_counts),
        num_fenced=len(fenced),
        num_host_total=host.num_total if host else 0,
        num_host_free=host.num_available if host else 0,
        live_slots=live,
        internal_waste_slots=len(used) * block_size - live,
    )


def live_sequences(state: SchedulerState) -> list[Sequence]:
    """Every sequence that wants more tokens, in order of arrival."""
    return [seq for group in state.groups.values() for seq in group.live]


def block_kinds(state: SchedulerState) -> bytes:
    """One byte per block: 0 free, 1 cached, 2 referenced, 3 fenced."""
    pool = state.blocks.pool
    kinds = bytearray(2 if count else 0 for count in pool.ref_counts)
    for block in range(pool.num_total):
        if not kinds[block] and pool.is_cached(BlockId(block)):
            kinds[block] = 1
    held: dict[BlockId, int] = {}
    for block_id in state.blocks.fenced_blocks():
        held[block_id] = held.get(block_id, 0) + 1
    for block_id, count in held.items():
        if pool.ref_counts[block_id] == count:
            kinds[block_id] = 3
    return bytes(kinds)
