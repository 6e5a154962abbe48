"""A rank other than 0: does what rank 0 says, and ends with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from octavo.v1 import executor_pb2 as pb

from executor_svc.config import ExecutorConfig
from executor_svc.errors import DeviceLost
from executor_svc.executor import Executor, Launched
from executor_svc.logs import get_logger
from executor_svc.tensor_parallel.leader import BEAT_DEADLINE_SECONDS, summary
from executor_svc.tensor_parallel.link import Kind, Link
from executor_svc.tensor_parallel.ranks import Ranks
from executor_svc.tensor_parallel.watch import Watch
from executor_svc.wire import read_plan

_log = get_logger(__name__)

_EXIT_LOST = 1


class Follower:
    """Carries out what comes over the link.

    A step is collected after the next one was launched, or before anything else is done: so
    its device goes from one step to the next as rank 0's does.
    """

    def __init__(self, executor: Executor, ranks: Ranks, watch_seconds: float) -> None:
        """Made while rank 0 makes its `Leader`; arguments as there."""
        self._executor = executor
        self._ranks = ranks
        self._link = Link(ranks, BEAT_DEADLINE_SECONDS + watch_seconds)
        self._watch = Watch(ranks, _end, watch_seconds)
        self._on_device: Launched | None = None

    @classmethod
    def load(cls, config: ExecutorConfig, folder: Path, ranks: Ranks) -> Follower:
        """Load this rank's share; raises what `Executor.load` does."""
        executor = Executor.load(config, folder, ranks)
        return cls(executor, ranks, config.step_deadline_seconds)

    def run(self) -> None:
        """Follow rank 0 until it says that the executor ends.

        Raises:
            DeviceLost: if it is gone, or a step failed in this rank alone.
        """
        self._watch.start()
        while True:
            message = self._link.receive()
            if message.kind is not Kind.STEP:
                self._collect()
            if message.kind is Kind.STEP:
                self._step(message.data)
            elif message.kind is Kind.RESET:
                self._executor.reset()
            elif message.kind is Kind.AUDIT:
                self._ranks.gather(summary(self._executor.audit()))
            elif message.kind is Kind.STOP:
                self._watch.stop()
                self._link.meet()
                return

    def _step(self, data: bytes) -> None:
        launched = self._executor.launch(read_plan(pb.StepPlan.FromString(data)))
        self._collect()
        self._on_device = launched
        if self._executor.is_done(launched):
            self._collect()

    def _collect(self) -> None:
        if self._on_device is not None:
            self._executor.collect(self._on_device)
            self._on_device = None


def _end(error: DeviceLost) -> NoReturn:
    """Called by the watch: this rank may wait for its device without end."""
    _log.critical("rank_lost", reason=str(error))
    os._exit(_EXIT_LOST)
