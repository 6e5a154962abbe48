"""Schedulers that claim one executor, as a world of which every state can be entered.

The executor's side is the real `Ownership`, `Lease` and `Fence`, called as the servicer and
the device thread call them; the wire, the queue of the device and the schedulers are modelled.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from executor_svc.errors import StaleEpoch
from executor_svc.ownership import Fence, Lease, Ownership
from tests.unit.executor.test_ownership import DESCRIPTION

_CLAIM, _LEAVE = "claim", "leave"

StreamId = tuple[int, int]  # scheduler, and which of its claims


@dataclass
class Stream:
    """One Run call, between a scheduler and the handler of the executor."""

    epoch: int
    sent: list[str | int] = field(default_factory=list)  # to the executor: steps are numbers
    is_told: bool = False  # the word that it is over is on its way to the scheduler
    lease: Lease | None = None
    is_claiming: bool = False  # the handler waits for the device
    is_cut: bool = False
    handled: bool = True  # the executor has not ended it
    watched: bool = True  # the scheduler has not ended it

    @property
    def is_taken(self) -> bool:
        """Whether its handler has a reason to end it, and is not waiting for the device."""
        has_reason = self.lease is not None and self.lease.end_reason is not None
        return self.handled and has_reason and not self.is_claiming


@dataclass
class Scheduler:
    """What one scheduler knows."""

    seen: int = 0  # highest epoch
    asked: bool = False
    num_claims: int = 0
    num_steps: int = 0
    owns: bool = False  # as far as it knows
    leaving: bool = False
    has_stream: bool = False


@dataclass(frozen=True)
class Size:
    """How much of everything there is."""

    num_schedulers: int
    max_claims: int  # of each scheduler
    max_steps: int  # of each claim
    max_cuts: int  # of all connections


T = TypeVar("T")


def _copy(value: T) -> T:
    """Copy one object, and nothing that it refers to: a fraction of copy.copy's time."""
    made = object.__new__(type(value))
    made.__dict__.update(value.__dict__)
    return made


@dataclass
class World:
    """One executor, its claimants, and what is on the way between them."""

    size: Size
    schedulers: list[Scheduler]
    num_cuts: int = 0
    ownership: Ownership = field(default_factory=Ownership)
    fence: Fence = field(default_factory=Fence)
    jobs: list[tuple[StreamId, int, int]] = field(default_factory=list)  # epoch, step; 0: claim
    rows: tuple[int, int] | None = None  # epoch and step of the last plan that was applied
    streams: dict[StreamId, Stream] = field(default_factory=dict)

    def clone(self) -> World:
        """Copy all that changes."""
        clone = _copy(self)
        clone.schedulers = [_copy(scheduler) for scheduler in self.schedulers]
        clone.ownership, clone.fence, clone.jobs = (
            _copy(self.ownership),
            _copy(self.fence),
            [*self.jobs],
        )
        clone.streams = {name: _copy(stream) for name, stream in self.streams.items()}
        leases: dict[int, Lease] = {}
        for stream in clone.streams.values():
            stream.sent = [*stream.sent]
        for owner in (clone.ownership, *clone.streams.values()):
            if owner.lease is not None:
                owner.lease = leases.setdefault(id(owner.lease), _copy(owner.lease))
        return clone

    def key(self) -> Hashable:
        """All that the future depends on, but for which scheduler has which number."""
        own: list[list[object]] = [[] for _ in self.schedulers]
        for (number, claim), stream in sorted(self.streams.items()):
            lease = stream.lease
            standing = None
            if lease is not None:
                is_held = lease is self.ownership.lease
                standing = (lease.last_step_id, lease.end_reason is None, is_held)
            values = (stream.epoch, stream.is_told, stream.is_claiming, stream.is_cut)
            ends = (stream.handled, stream.watched)
            own[number].append((claim, values, ends, tuple(stream.sent), standing))
        whole = [
            (tuple(vars(scheduler).values()), tuple(streams))
            for scheduler, streams in zip(self.schedulers, own, strict=True)
        ]
        order = sorted(range(len(whole)), key=lambda number: repr(whole[number]))
        place = {number: at for at, number in enumerate(order)}
        return (
            (self.ownership.epoch, self.ownership.lease is None, self.fence.epoch, self.rows),
            self.num_cuts,
            tuple(((place[number], claim), *job) for (number, claim), *job in self.jobs),
            tuple(whole[number] for number in order),
        )

    # What schedulers do, when they like to; one that is stopped does nothing for a while.

    def moves(self) -> Iterator[tuple[str, int]]:
        """What each scheduler may do next."""
        for number, scheduler in enumerate(self.schedulers):
            if scheduler.has_stream:
                if not scheduler.leaving:
                    yield "leave", number
                    if scheduler.num_steps < self.size.max_steps:
                        yield "plan", number
            elif scheduler.num_claims < self.size.max_claims:
                yield ("claim" if scheduler.asked else "ask"), number

    def ask(self, number: int) -> None:
        """It is told the epoch of this moment, which may be an old one when it claims."""
        scheduler = self.schedulers[number]
        scheduler.seen = max(scheduler.seen, self.ownership.epoch)
        scheduler.asked = True

    def claim(self, number: int) -> None:
        scheduler = self.schedulers[number]
        scheduler.num_claims += 1
        scheduler.num_steps = 0
        scheduler.seen += 1
        scheduler.asked = False
        scheduler.has_stream = True
        self.streams[number, scheduler.num_claims] = Stream(scheduler.seen, [_CLAIM])

    def plan(self, number: int) -> None:
        """It need not wait for the answer to its claim, and sends on what is cut."""
        scheduler = self.schedulers[number]
        scheduler.num_steps += 1
        self._send(number, scheduler.num_steps)

    def leave(self, number: int) -> None:
        self.schedulers[number].leaving = True
        self._send(number, _LEAVE)

    def _send(self, number: int, message: str | int) -> None:
        stream = self.streams[number, self.schedulers[number].num_claims]
        if not stream.is_cut and stream.handled:
            stream.sent.append(message)

    # What happens by itself: the wire, the handlers of the executor, its device.

    def happenings(self) -> Iterator[tuple[str, StreamId]]:
        """What may happen next, but for cuts."""
        if self.jobs:
            yield "compute", self.jobs[0][0]
        for name, stream in self.streams.items():
            if stream.handled:
                if stream.sent and not stream.is_claiming:
                    yield "handle", name
                if stream.is_taken:
                    yield "end", name
                if stream.is_cut:
                    yield "miss_owner", name
            if stream.watched:
                if stream.is_told:
                    yield "hear", name
                elif stream.is_cut:
                    yield "miss_executor", name

    def cuts(self) -> Iterator[tuple[str, StreamId]]:
        """Connections that may break now."""
        if self.num_cuts == self.size.max_cuts:
            return
        for name, stream in self.streams.items():
            if not stream.is_cut and stream.handled:
                yield "cut", name

    def cut(self, name: StreamId) -> None:
        """What the executor sends is lost; what it has received it may still carry out."""
        self.num_cuts += 1
        self.streams[name].is_cut = True

    def handle(self, name: StreamId) -> None:
        """The handler takes one message, also if it was told to end and has not yet."""
        stream = self.streams[name]
        message = stream.sent.pop(0)
        if message == _CLAIM:
            try:
                stream.lease = self.ownership.claim(
                    DESCRIPTION,
                    scheduler_id=f"s{name[0]}",
                    epoch=stream.epoch,
                    fingerprint="",
                    block_size=0,
                )
            except StaleEpoch:
                self._end(name)
                return
            self.fence.raise_to(stream.epoch)
            self.jobs.append((name, stream.epoch, 0))
            stream.is_claiming = True
        elif message == _LEAVE:
            self._end(name)
        else:
            assert isinstance(message, int)
            assert stream.lease is not None
            stream.lease.follow(epoch=stream.epoch, step_id=message, previous_step_id=message - 1)
            self.jobs.append((name, stream.epoch, message))

    def compute(self, _: StreamId) -> None:
        """The device does its next job, whoever is still there to hear of it."""
        name, epoch, step = self.jobs.pop(0)
        stream = self.streams.get(name)
        if step == 0:
            self.rows = None
            if stream is not None and stream.handled:
                stream.is_claiming = False
                # All that a scheduler does does it without this answer, too: no step of its own.
                if not stream.is_cut and stream.watched:
                    self.schedulers[name[0]].owns = True
            return
        try:
            self.fence.check(epoch)
        except StaleEpoch:
            if stream is not None and stream.handled:
                self._end(name)
            return
        self._apply(epoch, step)

    def _apply(self, epoch: int, step: int) -> None:
        newest = self.ownership.epoch
        assert epoch == newest, f"a plan of epoch {epoch} is applied, {newest} was claimed"
        expected = None if step == 1 else (epoch, step - 1)
        assert self.rows == expected, f"step {step} of epoch {epoch} finds rows of {self.rows}"
        self.rows = (epoch, step)

    def end(self, name: StreamId) -> None:
        """The handler ends the stream of an owner whose lease was taken."""
        self._end(name)

    def miss_owner(self, name: StreamId) -> None:
        """The executor notices that a connection is cut."""
        self._end(name)

    def _end(self, name: StreamId) -> None:
        stream = self.streams[name]
        stream.handled = False
        stream.is_claiming = False
        stream.sent.clear()
        if stream.lease is not None:
            self.ownership.release(stream.lease)
        stream.is_told = not stream.is_cut and stream.watched
        self._drop_done(name)

    def hear(self, name: StreamId) -> None:
        """A scheduler is told that it does not own the executor, or not any more."""
        self._let_go(name)

    def miss_executor(self, name: StreamId) -> None:
        """A scheduler notices that a connection is cut."""
        self._let_go(name)

    def _let_go(self, name: StreamId) -> None:
        scheduler = self.schedulers[name[0]]
        scheduler.owns = scheduler.leaving = scheduler.has_stream = False
        self.streams[name].watched = False
        self._drop_done(name)

    def _drop_done(self, name: StreamId) -> None:
        stream = self.streams[name]
        if not stream.handled and not stream.watched:
            del self.streams[name]

    # What must hold.

    def settle(self) -> None:
        """Let all happen that happens by itself."""
        while (happening := next(self.happenings(), None)) is not None:
            name, where = happening
            getattr(self, name)(where)

    def check_settled(self) -> None:
        """Who thinks that it owns the executor does, and nobody waits for ever."""
        for name, stream in self.streams.items():
            assert self.schedulers[name[0]].owns, f"scheduler {name[0]} waits for ever"
            assert stream.lease is self.ownership.lease, f"scheduler {name[0]} never learns"
        if self.ownership.lease is not None:
            assert self.streams, "the executor is owned by nobody"

    def check_claimable(self) -> None:
        """Whoever comes next gets the executor, with empty rows."""
        number = len(self.schedulers)
        self.schedulers.append(Scheduler())
        self.ask(number)
        self.claim(number)
        self.plan(number)
        self.settle()
        self.check_settled()
        assert self.schedulers[number].owns, "the executor cannot be claimed"
        assert self.rows == (self.ownership.epoch, 1), "the new owner's plan was not applied"
