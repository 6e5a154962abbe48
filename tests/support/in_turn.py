"""What the device thread drives, for stand-ins that compute a step when they are given it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from executor_svc.plan import Outcome, Plan


class InTurn(ABC):
    """A CPU: a step is done once it is launched."""

    def start(self, on_lost: Callable[[BaseException], None]) -> None:  # noqa: B027 # nothing to do
        """It is never lost."""

    def beat(self) -> None:  # noqa: B027 # nothing to do
        """Nobody waits for it."""

    def close(self) -> None:  # noqa: B027 # nothing to do
        """Nothing is open."""

    @abstractmethod
    def run(self, plan: Plan) -> Outcome:
        """Carry out one step."""

    def launch(self, plan: Plan) -> Outcome:
        """Run it; the rest only hands the answer on."""
        return self.run(plan)

    def is_done(self, launched: Outcome) -> bool:
        """It is."""
        return True

    def collect(self, launched: Outcome) -> Outcome:
        """Give the answer."""
        return launched
