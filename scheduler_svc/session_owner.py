"""What a session asks of, and tells, whoever holds it: the fleet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from scheduler_svc.core.state import Outcome
from scheduler_svc.observation.observer import Observer

if TYPE_CHECKING:
    from scheduler_svc.executor_session import ExecutorSession


class SessionOwner(Protocol):
    """Who decides what a session is for; all calls come from the event loop.

    Attributes:
        observer: is told of every step.
    """

    observer: Observer

    @property
    def is_draining(self) -> bool:
        """The scheduler is shutting down."""

    def may_claim(self, session: ExecutorSession) -> bool:
        """Whether a free executor should be claimed."""

    def deliver(self, session: ExecutorSession, outcome: Outcome) -> None:
        """Take what happened in a session's core."""

    def note_change(self) -> None:
        """A session was claimed, lost, or begins to drain."""
