"""The modelled executors of all schedulers: who runs what, and what moves.

Requests come to the schedulers in turn, as behind a balancer. Each scheduler places them on its
own executors. Groups of an executor that is lost, or given up, go to the others of its
scheduler by `scheduler_svc.placement`, as in service; where there is none they wait in their
core. A request that comes while no scheduler has an executor waits outside, as a client that
tries again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from scheduler_svc import placement
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import Counters
from scheduler_svc.errors import NeverFits, QueueFull
from scheduler_svc.simulator.executor import SimExecutor
from scheduler_svc.simulator.meter import Meter
from scheduler_svc.simulator.report import Sample
from scheduler_svc.simulator.routing import Router, as_sessions

NewExecutor = Callable[[int, int], SimExecutor]


class SimFleet:
    """Keeps requests where they can run.

    Invariant: every live request is in the core of one executor, or in `unplaced`.

    Attributes:
        executors: all that there are, by index.
        num_live: requests that have arrived and not ended.
        unplaced: requests that came while there was no executor.
    """

    def __init__(
        self,
        num_executors: int,
        num_schedulers: int,
        new_executor: NewExecutor,
        new_router: Callable[[], Router],
        meter: Meter,
    ) -> None:
        """Start with as many executors as there should be at first.

        Args:
            num_executors: at the start.
            num_schedulers: that share them evenly.
            new_executor: makes one, by its index and its scheduler's.
            new_router: makes a scheduler's router.
            meter: is told what happens.
        """
        self.executors: dict[int, SimExecutor] = {}
        self.num_live = 0
        self.unplaced: deque[Request] = deque()
        self._new_executor = new_executor
        self._meter = meter
        self._routers = [new_router() for _ in range(num_schedulers)]
        self._takers: list[list[SimExecutor]] = [[] for _ in range(num_schedulers)]
        self._next_scheduler = 0
        self._next_index = 0
        self._retired = Counters()
        self._counted_at = 0.0
        self.num_takers = 0
        for _ in range(num_executors):
            self._create()
        self._recount(0.0)

    # -- requests ------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Take a new request, or count it as refused."""
        self.num_live += 1
        self._place(request, now)

    def note_end(self) -> None:
        """A request has ended."""
        self.num_live -= 1

    def _place(self, request: Request, now: float) -> None:
        number = self._next_scheduler
        self._next_scheduler = (number + 1) % len(self._routers)
        for _ in self._routers:
            if self._takers[number]:
                break
            number = (number + 1) % len(self._routers)
        else:
            self.unplaced.append(request)
            return
        try:
            executor = self._routers[number].place(request, self._takers[number])
        except (NeverFits, QueueFull):
            self._meter.num_refused += 1
            self.num_live -= 1
        else:
            executor.plan(now)

    # -- executors that go ---------------------------------------------------------

    def note_death(self, executor: SimExecutor, now: float) -> None:
        """An executor that died is noticed: its requests go on elsewhere."""
        executor.lose(now)
        self._recount(now)
        self._rescue(executor.index % len(self._routers))

    def note_return(self, executor: SimExecutor, now: float) -> None:
        """It is back, empty: what waits for one goes there."""
        executor.come_back(now)
        self._welcome(executor, now)

    def retire(self, now: float) -> bool:
        """Give up the least loaded executor whose requests fit elsewhere; False if none does."""
        alive = [each for each in self._all_takers() if each.is_alive]
        for executor in sorted(alive, key=lambda each: each.load_tokens):
            number = executor.index % len(self._routers)
            others = [each for each in self._takers[number] if each is not executor]
            is_idle = not executor.core.has_requests
            if not is_idle and not (others and self._fits(executor, others)):
                continue
            executor.leave(now)
            self._recount(now)
            self._rescue(number)
            _add_counters(self._retired, executor.core.state.counters)
            del self.executors[executor.index]
            return True
        return False

    def enlarge(self, now: float) -> None:
        """Start one more executor."""
        self._welcome(self._create(), now)

    @staticmethod
    def _fits(executor: SimExecutor, others: list[SimExecutor]) -> bool:
        source: Any = executor
        return placement.fits_elsewhere(source, as_sessions(others))

    def _create(self) -> SimExecutor:
        index, self._next_index = self._next_index, self._next_index + 1
        executor = self._new_executor(index, index % len(self._routers))
        self.executors[index] = executor
        return executor

    def _welcome(self, executor: SimExecutor, now: float) -> None:
        self._recount(now)
        self._rescue(executor.index % len(self._routers))
        unplaced, self.unplaced = self.unplaced, deque()
        for request in unplaced:
            self._place(request, now)

    def _rescue(self, number: int) -> None:
        """Bring a scheduler's requests from where they cannot go on to where they can."""
        takers = self._takers[number]
        if not takers:
            return
        for executor in list(self.executors.values()):
            is_ours = executor.index % len(self._routers) == number
            if is_ours and not executor.takes_requests and executor.core.has_requests:
                source: Any = executor
                self._meter.num_moved += placement.move(source, as_sessions(takers), _ignore)

    def _recount(self, now: float) -> None:
        meter = self._meter
        meter.executor_seconds += self.num_takers * (now - self._counted_at)
        self._counted_at = now
        for takers in self._takers:
            takers.clear()
        for executor in self.executors.values():
            if executor.takes_requests:
                self._takers[executor.index % len(self._routers)].append(executor)
        self.num_takers = sum(map(len, self._takers))
        meter.max_executors = max(meter.max_executors, self.num_takers)

    # -- what can be seen ----------------------------------------------------------

    def _all_takers(self) -> list[SimExecutor]:
        return [each for takers in self._takers for each in takers]

    def longest_wait(self, now: float) -> float:
        """How long the first in line has waited where it has waited longest, in seconds."""
        waits = [now - request.arrival for request in self.unplaced]
        for executor in self._all_takers():
            first = executor.core.state.waiting.peek()
            if first is not None:
                waits.append(now - first.request.arrival)
        return max(waits, default=0.0)

    def block_use(self) -> float:
        """Share of all blocks that are referenced."""
        pools = [each.core.state.blocks.pool for each in self._all_takers()]
        total = sum(pool.num_total for pool in pools)
        return sum(pool.num_referenced for pool in pools) / total if total else 0.0

    def sample(self, now: float) -> Sample:
        """Sum up what all executors do now."""
        num_waiting, num_running = len(self.unplaced), 0
        num_tokens = self._retired.num_generated_tokens
        for executor in self.executors.values():
            state = executor.core.state
            num_waiting += len(state.waiting) + len(state.preempted)
            num_running += len(state.running)
            num_tokens += state.counters.num_generated_tokens
        return Sample(now, num_waiting, num_running, self.block_use(), self.num_takers, num_tokens)

    def close(self, now: float) -> dict[str, int]:
        """End the counting; returns the cores' counters, summed up."""
        self._recount(now)
        total = self._retired
        for executor in self.executors.values():
            _add_counters(total, executor.core.state.counters)
        return total.as_dict()


def _ignore(request_id: str, session: object) -> None:
    """Where a request is now is of no interest here: its core knows."""


def _add_counters(total: Counters, counters: Counters) -> None:
    for name, value in counters.as_dict().items():
        setattr(total, name, getattr(total, name) + value)
