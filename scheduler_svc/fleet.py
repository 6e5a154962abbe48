"""The executors of one scheduler: which there are, which are ours, and who runs where.

    addresses (list, DNS) ─> sessions ─> fair share ─> claimed ─> requests, by cached prefix
                                                          │           and load
                             lost, draining, given back ──┴─> groups move to the others

Invariant: a live request is in the core of exactly one session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Protocol

import structlog
from octavo.pem import TlsError

from scheduler_svc import placement
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import Outcome
from scheduler_svc.discovery import Discovery, Place
from scheduler_svc.errors import OctavoError, QueueFull, Unavailable
from scheduler_svc.executor_session import ExecutorSession
from scheduler_svc.observation.observer import Observer
from scheduler_svc.share import fair_share

_log = structlog.get_logger()

_TEND_SECONDS = 0.25
_RESOLVE_SECONDS = 5.0
_FRESH_SECONDS = 5.0
"""How long an executor's answer counts: as long as executors remember who asked."""
_RELEASE_AFTER_SECONDS = 2.0
"""How long too many executors are held before one is given back: views settle meanwhile."""


class RequestOwner(Protocol):
    """Whose requests run here; all calls come from the event loop."""

    def deliver(self, session: ExecutorSession, outcome: Outcome) -> None:
        """Take what happened in a session's core."""

    def note_place(self, request_id: str, session: ExecutorSession) -> None:
        """A request has moved to a session."""

    def give_up(self, request_id: str, error: OctavoError) -> None:
        """A request has waited too long for an executor."""


class Fleet:
    """Keeps sessions to all executors, and requests where they can run.

    Attributes:
        sessions: one per address, in the order of their coming.
        is_draining: executors are given back as they become idle, and none is claimed.
        observer: is told of every step.
        died: done, with the reason, once a session or this object has failed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        fingerprint: str,
        owner: RequestOwner,
        observer: Observer,
    ) -> None:
        """Prepare; `start` connects.

        Args:
            config: the service's settings.
            fingerprint: of the model; executors with another one are refused.
            owner: of the requests.
            observer: is told of every step.
        Raises:  TlsError: if the files of the TLS to executors cannot be used.
        """
        self.is_draining = False
        self.observer = observer
        self.died: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._config = config
        self._fingerprint = fingerprint
        self._owner = owner
        self._discovery = Discovery(config.executors, config.executor_server_name)
        self._sessions: dict[Place, ExecutorSession] = {}
        self._tasks: dict[ExecutorSession, asyncio.Task[None]] = {}
        self._tenders: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._too_many_since: float | None = None
        for place in self._discovery.fixed:
            self._sessions[place] = self._new_session(place)

    @property
    def sessions(self) -> list[ExecutorSession]:
        """One per address, in the order of their coming."""
        return list(self._sessions.values())

    # -- life ----------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to connect."""
        for session in self.sessions:
            self._run(session)
        self._tenders.append(asyncio.create_task(self._tend_for_ever()))
        if self._discovery.has_names:
            self._tenders.append(asyncio.create_task(self._look_for_ever()))
        for task in self._tenders:
            task.add_done_callback(self._note_end)

    async def stop(self) -> None:
        """Let go of all executors."""
        self._is_stopping = True
        tasks = [*self._tasks.values(), *self._tenders]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _new_session(self, place: Place) -> ExecutorSession:
        return ExecutorSession(
            place.address, self._config, self._fingerprint, self, place.server_name
        )

    def _run(self, session: ExecutorSession) -> None:
        task = asyncio.create_task(session.run())
        task.add_done_callback(self._note_end)
        self._tasks[session] = task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """All tasks run for ever: one that ends by an error leaves what cannot be trusted."""
        if self._is_stopping or self.died.done():
            return
        error = None if task.cancelled() else task.exception()
        self.died.set_result(error or RuntimeError("a task of the fleet ended"))

    # -- requests ------------------------------------------------------------------

    def place(self, request: Request) -> ExecutorSession:
        """Give a new request to the executor where it costs least.

        Raises:  NeverFits, QueueFull, Unavailable.
        """
        sessions = self._takers()
        if not sessions:
            raise Unavailable(f"no executor takes requests ({self.why_none()})")
        return placement.place(request, sessions)

    def check_room(self, now: float, priority: int) -> None:
        """Say early whether a request that comes now would be refused, however small it is.

        Raises:  QueueFull: if no executor's queue takes one.
        """
        refusal: QueueFull | None = None
        for session in self._takers():
            assert session.core is not None
            try:
                session.core.check_room(now, priority)
            except QueueFull as error:
                refusal = error
            else:
                return
        if refusal is not None:
            raise refusal

    def why_none(self) -> str:
        """Say in one line why no executor can be used."""
        reasons = [
            f"{session.address}: {'is shutting down' if session.connected else session.last_error}"
            for session in self.sessions
        ]
        return "; ".join(reasons) or "none is found"

    def _takers(self) -> list[ExecutorSession]:
        return [session for session in self._sessions.values() if session.takes_requests]

    # -- what sessions call --------------------------------------------------------

    def deliver(self, session: ExecutorSession, outcome: Outcome) -> None:
        """Take what happened in a session's core."""
        self._owner.deliver(session, outcome)

    def may_claim(self, session: ExecutorSession) -> bool:
        """Whether a free executor should be claimed: we hold fewer than our share.

        While we are leaving, only one whose requests wait for it.
        """
        if session not in self._tasks or self._is_reached_twice(session):
            return False
        if self.is_draining:
            return session.core is not None and session.core.has_requests
        held = sum(
            (each.connected or each.is_claiming) and not each.is_draining
            for each in self._sessions.values()
        )
        return held < self._share()

    def _is_reached_twice(self, session: ExecutorSession) -> bool:
        """Whether it is an executor that we have by another address."""
        instance = session.seen.instance if session.seen is not None else ""
        return bool(instance) and any(
            other is not session
            and (other.connected or other.is_claiming)
            and other.seen is not None
            and other.seen.instance == instance
            for other in self._sessions.values()
        )

    def note_change(self) -> None:
        """Bring requests from where they cannot go on to where they can."""
        takers = self._takers()
        if not takers:
            return
        for source in self.sessions:
            if not source.takes_requests and source.core is not None and source.core.has_requests:
                self._move(source, [taker for taker in takers if taker is not source])

    def _move(self, source: ExecutorSession, takers: list[ExecutorSession]) -> None:
        """Move a session's groups; one that still runs them goes on with those it must keep."""
        if not takers:
            return
        if source.connected:
            if not placement.fits_elsewhere(source, takers):
                return
            source.deliver()
            source.leave()
        num_moved = placement.move(source, takers, self._owner.note_place)
        for session in (source, *takers):
            session.deliver()
        if num_moved:
            _log.info("requests_moved", executor=source.address, num_requests=num_moved)

    # -- whose executors are whose -------------------------------------------------

    def _share(self) -> int:
        """How many executors should be ours, by what they say of themselves."""
        me, now = self._config.scheduler_id, time.monotonic()
        owners: list[str] = []
        schedulers: set[str] = set()
        for session in self._sessions.values():
            seen = session.seen
            is_fresh = seen is not None and now - seen.at < _FRESH_SECONDS
            if session.is_draining or not (session.connected or is_fresh):
                continue
            if self._is_reached_twice(session) and not session.connected:
                continue
            owners.append(me if session.connected else seen.owner if seen else "")
            schedulers.update(seen.schedulers if seen and is_fresh else ())
        return fair_share(me, owners, schedulers)

    async def _tend_for_ever(self) -> None:
        while True:
            now = time.monotonic()
            self._tend_orphans(now)
            self._give_back(now)
            await asyncio.sleep(_TEND_SECONDS)

    def _tend_orphans(self, now: float) -> None:
        """Let deadlines reach requests that have no executor, and none of them wait for ever."""
        for session in self.sessions:
            core = session.core
            if session.connected or core is None or not core.has_requests:
                continue
            core.expire(now)
            session.deliver()
            self._give_up_orphans(core, now - session.lost_at, self._handover_seconds(now))

    def _give_up_orphans(self, core: Scheduler, waited: float, handover: float) -> None:
        """End requests that have waited too long; their clients may resume elsewhere.

        One that came from elsewhere, and that an executor died under alone, waits for its own
        here, where that is known: it may be what kills them.
        """
        error = Unavailable(f"no executor came within {waited:.0f} s: resume elsewhere")
        for request_id, group in list(core.state.groups.items()):
            is_kept = group.num_deaths > 0 and group.request.resumed
            if waited > (self._config.orphan_timeout_seconds if is_kept else handover):
                self._owner.give_up(request_id, error)
                core.cancel(request_id)
                core.take_outcome()

    def _handover_seconds(self, now: float) -> float:
        """How long requests wait: not long, where a client that resumes will be served."""
        mine = ("", self._config.scheduler_id)
        for session in self._sessions.values():
            seen = session.seen
            if seen is not None and now - seen.at < _FRESH_SECONDS and seen.owner not in mine:
                return min(self._config.handover_seconds, self._config.orphan_timeout_seconds)
        return self._config.orphan_timeout_seconds

    def _give_back(self, now: float) -> None:
        """Give back an executor that is beyond our share, or idle while it or we are leaving."""
        for session in self._sessions.values():
            is_idle = session.core is None or not session.core.has_requests
            if session.connected and is_idle and (self.is_draining or session.is_draining):
                session.leave()
        if self.is_draining:
            return
        held = self._takers()
        if len(held) <= max(1, self._share()):
            self._too_many_since = None
            return
        self._too_many_since = self._too_many_since or now
        if now - self._too_many_since < _RELEASE_AFTER_SECONDS:
            return
        self._too_many_since = None
        for session in sorted(held, key=lambda each: each.load_tokens):
            takers = [taker for taker in held if taker is not session]
            if placement.fits_elsewhere(session, takers):
                _log.info("executor_given_back", executor=session.address)
                session.deliver()
                session.leave()
                self._move(session, takers)
                return

    # -- places that come and go ---------------------------------------------------

    async def _look_for_ever(self) -> None:
        while True:
            places = await self._discovery.find()
            self._forget_places(set(places))
            for place in places:
                if place not in self._sessions:
                    self._welcome(place)
            await asyncio.sleep(_RESOLVE_SECONDS)

    def _welcome(self, place: Place) -> None:
        try:
            session = self._new_session(place)
        except TlsError as error:  # the files are broken just now
            _log.warning("executor_not_reachable", executor=place.address, reason=str(error))
            return
        _log.info("executor_found", executor=place.address)
        self._sessions[place] = session
        self._run(session)

    def _forget_places(self, known: Iterable[Place]) -> None:
        """Drop sessions whose address is gone, once nothing is connected or waits there."""
        for place, session in list(self._sessions.items()):
            has_requests = session.core is not None and session.core.has_requests
            if place in known or session.connected or session.is_claiming or has_requests:
                continue
            _log.info("executor_forgotten", executor=place.address)
            del self._sessions[place]
            task = self._tasks.pop(session)
            task.remove_done_callback(self._note_end)
            task.cancel()
