"""What a run did to the pool, from counters before and after."""

from __future__ import annotations

from octavo.v1 import admin_pb2
from octavo_client import _admin
from octavo_client.bench.memory import MemoryUse


def snapshot(**counters: int) -> object:
    """One executor's snapshot, as it comes over the wire."""
    state = admin_pb2.ExecutorState(pool={"block_size": 16}, counters=counters)
    return _admin.parse_snapshot(admin_pb2.Snapshot(executors=[state]))


def test_shares_are_of_the_run_alone() -> None:
    """Use and saving come from the difference of two snapshots, not from totals."""
    before = snapshot(live_slot_steps=1000, allocated_slot_steps=5000, saved_block_steps=7)
    after = snapshot(
        live_slot_steps=1000 + 1560,
        allocated_slot_steps=5000 + 1600,
        saved_block_steps=7 + 25,
        num_swap_preemptions=3,
        executor_idle_ns=7_000_000,
        executor_busy_ns=393_000_000,
    )
    use = MemoryUse.between(before, after)  # type: ignore[arg-type]
    assert use.kv_use == 1560 / 1600
    # 100 blocks were allocated and 25 saved: 125 without sharing.
    assert use.saved_by_sharing == 25 / 125
    assert use.num_swap_preemptions == 3
    assert use.prefix_hit_rate == 0.0
    assert use.executor_idle == 7 / 400
    assert "executor idle 1.75%" in use.line()


def test_a_scheduler_that_did_nothing_has_no_shares() -> None:
    """Zero, rather than an error."""
    nothing = snapshot()
    use = MemoryUse.between(nothing, nothing)  # type: ignore[arg-type]
    assert (use.kv_use, use.saved_by_sharing, use.executor_idle) == (0, 0, 0)
