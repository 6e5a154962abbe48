"""Rank 0: hands every plan on to the others, then carries it out with them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from executor_svc.config import ExecutorConfig
from executor_svc.errors import DeviceLost
from executor_svc.executor import Executor, Launched
from executor_svc.plan import Outcome, Plan, RowDigest
from executor_svc.tensor_parallel.link import Kind, Link, Message
from executor_svc.tensor_parallel.ranks import Ranks
from executor_svc.tensor_parallel.watch import Watch

BEAT_DEADLINE_SECONDS = 120.0
"""How long the other ranks wait for a word of rank 0, a step of it included."""

_STOP_SECONDS = 1.0


class Leader:
    """Drives the executors of all ranks as one; see `device_thread.Engine`.

    Invariant: each rank's executor is called with the same plans in the same order.
    """

    def __init__(self, executor: Executor, ranks: Ranks, watch_seconds: float) -> None:
        """Made while each other rank makes its `Follower`.

        Args:
            executor: rank 0's.
            ranks: the group.
            watch_seconds: after which a rank that does not answer counts as gone.
        """
        self._executor = executor
        self._ranks = ranks
        self._link = Link(ranks, BEAT_DEADLINE_SECONDS + watch_seconds)
        self._watch_seconds = watch_seconds
        self._watch: Watch | None = None
        self.description = executor.description

    @classmethod
    def load(cls, config: ExecutorConfig, folder: Path, ranks: Ranks) -> Leader:
        """Load rank 0's share, while the others load theirs; raises what `Executor.load` does."""
        executor = Executor.load(config, folder, ranks)
        return cls(executor, ranks, config.step_deadline_seconds)

    @property
    def num_rows(self) -> int:
        """How many rows exist, in each rank."""
        return self._executor.num_rows

    def start(self, on_lost: Callable[[BaseException], None]) -> None:
        """Watch the other ranks."""
        self._watch = Watch(self._ranks, on_lost, self._watch_seconds)
        self._watch.start()

    def beat(self) -> None:
        """Show the others that rank 0 is there."""
        self._link.send(Message(Kind.BEAT))

    def close(self) -> None:
        """End the other ranks, and wait until they know."""
        if self._watch is not None:
            self._watch.stop()
        self._link.send(Message(Kind.STOP))
        self._link.meet(_STOP_SECONDS)

    def reset(self) -> None:
        """Forget every row, in all ranks."""
        self._link.send(Message(Kind.RESET))
        self._executor.reset()

    def launch(self, plan: Plan) -> Launched:
        """Give all ranks' devices one step; see `Executor.launch`."""
        assert plan.encode is not None, "only plans that came as messages can be handed on"
        self._link.send(Message(Kind.STEP, plan.encode()))
        return self._executor.launch(plan)

    def is_done(self, launched: Launched) -> bool:
        """Whether `collect` would not wait."""
        return self._executor.is_done(launched)

    def collect(self, launched: Launched) -> Outcome:
        """Wait for a step, and give its answer."""
        return self._executor.collect(launched)

    def audit(self) -> list[RowDigest]:
        """Digest of every row, the same in all ranks.

        Raises:
            DeviceLost: if another rank's rows differ; nothing it computes can be trusted.
        """
        self._link.send(Message(Kind.AUDIT))
        digests = self._executor.audit()
        summaries = self._ranks.gather(summary(digests))
        others = [rank for rank, other in enumerate(summaries) if other != summaries[0]]
        if others:
            raise DeviceLost(f"the rows of rank {others[0]} are not those of rank 0")
        return digests


def summary(digests: list[RowDigest]) -> bytes:
    """Sums up all rows of one rank."""
    return hashlib.sha256(repr(digests).encode()).digest()
