"""Cores of a simulation under watch: their invariants hold whenever something was delivered."""

from __future__ import annotations

import pytest

from scheduler_svc.core import invariants
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import DecodeSet
from scheduler_svc.simulator.executor import SimExecutor


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> dict[int, Scheduler]:
    """Cores of all executors, by index; their invariants are checked at every delivery."""
    found: dict[int, Scheduler] = {}
    deliver = SimExecutor.deliver

    def checked(self: SimExecutor, now: float, steady: DecodeSet | None) -> None:
        found[self.index] = self.core
        deliver(self, now, steady)
        if self.takes_requests:  # otherwise it was lost, and `restart` or `evacuate` must follow
            invariants.check(self.core.state)

    monkeypatch.setattr(SimExecutor, "deliver", checked)
    return found
