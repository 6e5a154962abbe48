"""What a run did to pool and executor, from the scheduler's own counters before and after."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo_client import Counters, Snapshot


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Differences of counters over one run, all executors together.

    Attributes:
        kv_use: slots that held a token ÷ slots of referenced blocks, mean over steps.
        saved_by_sharing: blocks that sharing saved ÷ blocks without sharing, the same.
        num_recompute_preemptions, num_swap_preemptions: sequences preempted, by kind.
        num_copied_blocks: copies on write.
        prefix_hit_rate: prompt tokens found in the prefix cache ÷ looked up.
        num_steps: iterations.
        executor_idle: share of the executors' time in which they waited for a plan though
            requests were running.
    """

    kv_use: float
    saved_by_sharing: float
    num_recompute_preemptions: int
    num_swap_preemptions: int
    num_copied_blocks: int
    prefix_hit_rate: float
    num_steps: int
    executor_idle: float

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> MemoryUse:
        """Compare two snapshots of one scheduler."""
        block_size = max((e.pool.block_size for e in after.executors), default=1)

        def grown(name: str) -> int:
            return _total(after, name) - _total(before, name)

        idle, busy = grown("executor_idle_ns"), grown("executor_busy_ns")
        allocated, saved = grown("allocated_slot_steps"), grown("saved_block_steps")
        return cls(
            kv_use=_ratio(grown("live_slot_steps"), allocated),
            saved_by_sharing=_ratio(saved, saved + allocated / block_size),
            num_recompute_preemptions=grown("num_recompute_preemptions"),
            num_swap_preemptions=grown("num_swap_preemptions"),
            num_copied_blocks=grown("num_copied_blocks"),
            prefix_hit_rate=_ratio(
                grown("num_prefix_hit_tokens"), grown("num_prefix_query_tokens")
            ),
            num_steps=grown("num_steps"),
            executor_idle=_ratio(idle, idle + busy),
        )

    def to_json(self) -> dict[str, Any]:
        """The figures by name."""
        return asdict(self)

    def line(self) -> str:
        """One line for people."""
        return (
            f"KV slots in use {self.kv_use:.1%} of those allocated, "
            f"{self.saved_by_sharing:.1%} of blocks saved by sharing, "
            f"{self.num_copied_blocks} copied; prefix hits {self.prefix_hit_rate:.1%}; "
            f"preempted {self.num_recompute_preemptions} by recompute, "
            f"{self.num_swap_preemptions} by swap; {self.num_steps} steps, "
            f"executor idle {self.executor_idle:.2%} of their time"
        )


def _total(snapshot: Snapshot, name: str) -> int:
    counters: list[Counters] = [executor.counters for executor in snapshot.executors]
    return sum(int(getattr(each, name)) for each in counters)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
