"""What is broken, when, and for how long: a plan drawn from a seed, and its execution."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from tests.chaos.ledger import Ledger
from tests.chaos.links import Link, Way
from tests.chaos.processes import Service
from tests.chaos.stack import Stack

_T = TypeVar("_T")
_RESTART_SECONDS = 120.0
_LONG_SHARE = 0.1  # of cuts and stops that outlast every keep-alive, where there is time


class Kind(StrEnum):
    """What happens to a process, or to a link."""

    KILL = "kill -9"
    FREEZE = "SIGSTOP, SIGCONT"
    CUT = "cut both ways"
    CUT_FORWARD = "cut towards it"
    CUT_BACKWARD = "cut away from it"
    DELAY = "delay"
    RESET = "reset"
    REFUSE = "reset and refuse"


WAYS = {Kind.CUT: Way.BOTH, Kind.CUT_FORWARD: Way.FORWARD, Kind.CUT_BACKWARD: Way.BACKWARD}
_LASTING = (Kind.FREEZE, *WAYS)
_CLASSES = ("executor", "scheduler", "gateway")
_WEIGHTS = {
    Kind.KILL: 5,
    Kind.FREEZE: 4,
    Kind.CUT: 3,
    Kind.CUT_FORWARD: 2,
    Kind.CUT_BACKWARD: 2,
    Kind.DELAY: 2,
    Kind.RESET: 3,
    Kind.REFUSE: 1,
}
_CLASS_WEIGHTS = {"executor": 5, "scheduler": 4, "gateway": 1}


@dataclass(frozen=True)
class Fault:
    """One thing to break.

    Attributes:
        at: seconds after the phase's begin.
        kind: what happens.
        target: the service's name, or the link's, which ends in the service's.
        seconds: until it is healed; a killed process is started again by its supervisor.
        delay_seconds: of a delay.
    """

    at: float
    kind: Kind
    target: str
    seconds: float
    delay_seconds: float = 0.0

    @property
    def service(self) -> str:
        """What it happens to, or what is behind the link."""
        return self.target.rpartition(">")[2]


@dataclass(frozen=True)
class Pace:
    """How faults are spread.

    Attributes:
        num_faults: in all.
        seconds: in which they begin.
        lethal_share: of the time, at its begin, in which processes are killed. After that the
            processes live on, and must not grow.
        longest_seconds: of a fault.
    """

    num_faults: int
    seconds: float
    lethal_share: float = 0.65
    longest_seconds: float = 20.0

    @property
    def lethal_seconds(self) -> float:
        """Of the first phase."""
        return self.seconds * self.lethal_share


def draw_plan(seed: int, pace: Pace, stack: Stack) -> tuple[list[Fault], list[Fault]]:
    """Draw both phases: the one in which processes are killed, and the one after.

    Each kind happens to each class of service as soon as there are 24 faults; further ones are
    drawn by weight.
    """
    rng = random.Random(seed)
    combinations = list(itertools.product(Kind, _CLASSES))
    rng.shuffle(combinations)
    further = pace.num_faults - len(combinations)
    pairs = combinations[: pace.num_faults] + [
        (_drawn(rng, _WEIGHTS), _drawn(rng, _CLASS_WEIGHTS)) for _ in range(further)
    ]
    phases: tuple[list[Fault], list[Fault]] = ([], [])
    for at, kind, class_name in _spread(rng, pairs, pace):
        is_late = at > pace.lethal_seconds
        fault = Fault(
            at=at - pace.lethal_seconds * is_late,
            kind=kind,
            target=_target(rng, stack, kind, class_name),
            seconds=_duration(rng, kind, pace.longest_seconds),
            delay_seconds=rng.uniform(0.02, 0.3) if kind is Kind.DELAY else 0.0,
        )
        phases[is_late].append(fault)
    for phase in phases:
        phase.sort(key=lambda fault: fault.at)
    return phases


class Breaker:
    """Carries a plan out.

    Faults overlap as they come, several on different services or links at a time; one service,
    or one link, has one at a time, and a process has started before it is disturbed.
    """

    def __init__(self, stack: Stack, ledger: Ledger, on_fault: Callable[[], None]) -> None:
        self._stack = stack
        self._ledger = ledger
        self._on_fault = on_fault
        self._services = {service.name: service for service in stack.services}
        self._link_locks = {name: asyncio.Lock() for name in stack.links}

    async def carry_out(self, faults: list[Fault], seconds: float) -> None:
        """Inject all faults; return once that time is over, and all are healed.

        Every process has started then.
        """
        loop = asyncio.get_running_loop()
        begin = loop.time()
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(max(begin + fault.at - loop.time(), 0.0))
                group.create_task(self._inject(fault))
            await asyncio.sleep(max(begin + seconds - loop.time(), 0.0))
        for service in self._services.values():
            await service.wait_started(_RESTART_SECONDS)

    async def _inject(self, fault: Fault) -> None:
        if fault.kind in (Kind.KILL, Kind.FREEZE):
            service = self._services[fault.target]
            async with service.busy:
                await service.wait_started(_RESTART_SECONDS)
                await (self._kill if fault.kind is Kind.KILL else self._freeze)(service, fault)
            return
        async with self._link_locks[fault.target]:
            self._note(fault)
            await _disturb(self._stack.links[fault.target], fault)

    async def _kill(self, service: Service, fault: Fault) -> None:
        if service in self._stack.executors:
            others = (each for each in self._stack.executors if each is not service)
            is_another_up = any(each.has_started.is_set() for each in others)
            self._ledger.note_death(await self._stack.requests_on(service), is_another_up)
        incarnation = service.incarnation
        service.kill()
        self._note(fault)
        await service.wait_next(incarnation, _RESTART_SECONDS)

    async def _freeze(self, service: Service, fault: Fault) -> None:
        service.freeze()
        self._note(fault)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            service.resume()

    def _note(self, fault: Fault) -> None:
        self._ledger.note_fault(fault.kind, fault.target)
        self._on_fault()


async def _disturb(link: Link, fault: Fault) -> None:
    pause: Awaitable[None] = asyncio.sleep(fault.seconds)
    if fault.kind in WAYS:
        link.cut(WAYS[fault.kind])
    elif fault.kind is Kind.DELAY:
        link.delay(fault.delay_seconds)
    elif fault.kind is Kind.REFUSE:
        link.stop_listening()
        link.reset()
    else:
        link.reset()
    try:
        await pause
    finally:
        link.restore()
        await link.start()


def _spread(
    rng: random.Random, pairs: list[tuple[Kind, str]], pace: Pace
) -> Iterator[tuple[float, Kind, str]]:
    """Give every fault its moment.

    Of n faults of one kind and class, one falls into each n-th of the time: a process that is
    killed takes its time to start, and all of that time is not to be one outage.
    """
    for (kind, class_name), count in Counter(pairs).items():
        seconds = pace.lethal_seconds if kind is Kind.KILL else pace.seconds
        for number in range(count):
            yield (number + rng.random()) / count * seconds, kind, class_name


def _drawn(rng: random.Random, weights: dict[_T, int]) -> _T:
    return rng.choices(list(weights), list(weights.values()))[0]


def _target(rng: random.Random, stack: Stack, kind: Kind, class_name: str) -> str:
    services = [each.name for each in stack.services if each.name.startswith(class_name)]
    name = rng.choice(services)
    if kind in (Kind.KILL, Kind.FREEZE):
        return name
    return rng.choice([link for link in stack.links if link.endswith(f">{name}")])


def _duration(rng: random.Random, kind: Kind, longest_seconds: float) -> float:
    """Mostly short; some cuts and stops outlast every keep-alive, if they may."""
    if kind is Kind.RESET:
        return 0.0
    if kind in _LASTING and rng.random() < _LONG_SHARE:
        return longest_seconds
    return rng.uniform(0.3, min(7.0, longest_seconds))
