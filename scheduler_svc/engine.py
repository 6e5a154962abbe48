"""The engine: requests in, token streams out, executors below.

    servicer -> Engine.submit -> a session's core        (a request, by value)
    servicer <- TokenStream   <- outcomes of the core    (tokens, by value)

The fleet gives a request to a session and takes it to another one when that is lost; the
engine hands outcomes to streams, and drains. All of it runs on one event loop; the core is
called from nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

import structlog

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.state import Outcome
from scheduler_svc.errors import DuplicateRequest, OctavoError, RequestFailed, Unavailable
from scheduler_svc.executor_session import ExecutorSession
from scheduler_svc.fleet import Fleet
from scheduler_svc.observation.observer import Observer
from scheduler_svc.stream import TokenStream

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the connected executors can do together: the least of each."""

    max_model_len: int
    vocab_size: int
    kv_capacity_tokens: int
    dtype: str


class Engine:
    """Runs requests on executors.

    Invariant: a request has a stream here exactly as long as a core holds its group, and a
    stream that is let go of has ended for its reader.

    Attributes:
        is_draining: nothing new is taken.
        observer: is told what happens.
    """

    def __init__(
        self, config: SchedulerConfig, fingerprint: str, observer: Observer | None = None
    ) -> None:
        """Prepare; `start` connects.

        Args:
            config: the service's settings.
            fingerprint: of the model; executors with another one are refused.
            observer: is told what happens; None: one that makes no spans.
        """
        self.observer = observer or Observer()
        self._fleet = Fleet(config, fingerprint, self, self.observer)
        self.is_draining = False
        self._streams: dict[str, TokenStream] = {}
        self._owners: dict[str, ExecutorSession] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    # -- life ----------------------------------------------------------------------

    @property
    def sessions(self) -> list[ExecutorSession]:
        """One per executor."""
        return self._fleet.sessions

    @property
    def died(self) -> asyncio.Future[BaseException]:
        """Done, with the reason, once the engine cannot go on."""
        return self._fleet.died

    async def start(self) -> None:
        """Begin to connect to the executors."""
        await self._fleet.start()

    async def drain(self, grace_seconds: float) -> int:
        """Take no new requests and let the live ones finish; idle executors are given back.

        Returns: how many were cut off because the grace was over.
        """
        self.is_draining = self._fleet.is_draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_seconds)
        left = list(self._streams)
        for request_id in left:
            error = Unavailable("the scheduler shut down before the request was done")
            self.give_up(request_id, error)
        return len(left)

    async def stop(self) -> None:
        """Let go of the executors."""
        await self._fleet.stop()

    @property
    def is_healthy(self) -> bool:
        """An executor takes requests and its steps advance."""
        return any(s.takes_requests and not s.is_stalled for s in self.sessions)

    @property
    def num_requests(self) -> int:
        """Live requests."""
        return len(self._streams)

    def num_generated_tokens(self, request_id: str) -> int:
        """Tokens that the choices of a live request have so far; 0 if there is no such one."""
        session = self._owners.get(request_id)
        group = session.core.state.groups.get(request_id) if session and session.core else None
        return sum(seq.num_output_tokens for seq in group.live) if group is not None else 0

    # -- requests ------------------------------------------------------------------

    def check_room(self, now: float, priority: int) -> None:
        """Say early, before its prompt costs anything, whether a request would be refused.

        Raises:  QueueFull.
        """
        self._fleet.check_room(now, priority)

    async def submit(self, request: Request) -> TokenStream:
        """Accept a request.

        Raises:  DuplicateRequest, NeverFits, QueueFull, Unavailable.
        """
        if self.is_draining:
            raise Unavailable("the scheduler is shutting down")
        if request.request_id in self._streams:
            raise DuplicateRequest(f"request_id {request.request_id!r} is in use")
        session = self._fleet.place(request)
        stream = TokenStream(request, self._stop, self._cancel)
        self._streams[request.request_id] = stream
        self._owners[request.request_id] = session
        self._idle.clear()
        self.observer.note_submitted(request, session.address)
        session.deliver()
        session.wake()
        return stream

    def describe(self) -> ModelLimits | None:
        """Say what the connected executors can do; None while there is none."""
        found = [s.description for s in self.sessions if s.connected and s.description]
        if not found:
            return None
        return ModelLimits(
            max_model_len=min(d.max_model_len for d in found),
            vocab_size=min(d.vocab_size for d in found),
            kv_capacity_tokens=min(d.num_device_blocks * d.block_size for d in found),
            dtype=found[0].dtype,
        )

    def _stop(self, request_id: str, sample_index: int) -> None:
        session = self._owners.get(request_id)
        if session is not None and session.core is not None:
            session.core.stop(request_id, sample_index)
            session.deliver()
            session.wake()

    def _cancel(self, request_id: str) -> None:
        session = self._owners.get(request_id)
        if session is not None and session.core is not None:
            session.core.cancel(request_id)
            session.deliver()
            session.wake()

    # -- outcomes ------------------------------------------------------------------

    def note_place(self, request_id: str, session: ExecutorSession) -> None:
        """A request has moved to another executor."""
        self._owners[request_id] = session

    def give_up(self, request_id: str, error: OctavoError) -> None:
        """End a request that no executor will go on with."""
        stream = self._streams.get(request_id)
        if stream is not None:
            request = stream.request
            self.observer.note_finished(
                request,
                "",
                FinishReason.CANCELLED,
                took=time.monotonic() - request.arrival,
                num_tokens=self.num_generated_tokens(request_id),
                error=str(error),
            )
            stream.fail(error)
            self._forget(request_id)

    def deliver(self, session: ExecutorSession, outcome: Outcome) -> None:
        """Hand what happened in a session's core to the streams of its requests."""
        streams, executor = self._streams, session.address
        now = time.monotonic()
        for group in outcome.admitted:
            waited = now - group.request.arrival
            self.observer.note_admitted(group, executor, waited)
            stream = streams.get(group.request.request_id)
            if stream is not None:
                stream.stats.queue_seconds = waited
                stream.stats.cached_prompt_tokens = group.cached_prompt_tokens
        for event in outcome.events:
            self.observer.note_event(event, executor)
        for seq, logprobs in outcome.logprobs:
            stream = streams.get(seq.group.request.request_id)
            if stream is not None:
                stream.push_logprobs(seq.sample_index, logprobs.sampled, logprobs.prompt)
        if outcome.tokens:
            self._deliver_tokens(outcome, executor, now)
        self._deliver_beams(outcome, executor, now)
        for seq in outcome.finished:
            self._finish(seq, outcome.errors.get(seq, ""))
        self._tell_ends(outcome, executor, now)
        groups = session.core.state.groups if session.core is not None else {}
        for request_id in {s.group.request.request_id for s in outcome.finished}:
            if request_id in streams and request_id not in groups:
                self._forget(request_id)

    def _deliver_tokens(self, outcome: Outcome, executor: str, now: float) -> None:
        streams = self._streams
        # Sequences that had their last token at the same time, nearly all, are counted together.
        last: dict[float, int] = {}
        same, num_same = 0.0, 0
        for seq, token in zip(outcome.sampled, outcome.tokens, strict=True):
            stream = streams.get(seq.group.request.request_id)
            if stream is None:
                continue
            stream.push_token(seq.sample_index, token)
            told_at, seq.told_at = seq.told_at, now
            if told_at == same:
                num_same += 1
            else:
                last[same] = last.get(same, 0) + num_same
                same, num_same = told_at, 1
            if not told_at:
                self._begin(stream, executor, now)
        last[same] = last.get(same, 0) + num_same
        del last[0.0]  # their first one
        for told_at, count in last.items():
            self.observer.note_later_tokens(now - told_at, count)

    def _begin(self, stream: TokenStream, executor: str, now: float) -> None:
        waited = stream.note_begin(now)
        if waited is not None:
            self.observer.note_first_token(stream.request, executor, waited)

    def _deliver_beams(self, outcome: Outcome, executor: str, now: float) -> None:
        for group, hypotheses in outcome.hypotheses:
            stream = self._streams.get(group.request.request_id)
            if stream is None:
                continue
            request = group.request
            self._begin(stream, executor, now)
            for index, found in enumerate(hypotheses):
                self.observer.note_finished(
                    request,
                    executor,
                    found.reason,
                    took=now - request.arrival,
                    num_tokens=len(found.tokens),
                )
                for token in found.tokens:
                    stream.push_token(index, token)
                last = found.tokens[-1]
                stream.push_finish(
                    index,
                    found.reason,
                    stop_token_id=last if last in request.stop_token_ids else None,
                    cumulative_logprob=found.cumulative_logprob,
                )
            # Fewer tokens allowed than choices asked for: the rest ends empty.
            stream.finish_all(FinishReason.STOP)
            self._forget(request.request_id)

    def _tell_ends(self, outcome: Outcome, executor: str, now: float) -> None:
        """Tell the observer of each choice that ended; a beam search that was cut off has n."""
        searches: set[str] = set()
        for seq in outcome.finished:
            request = seq.group.request
            if request.request_id not in self._streams:
                continue  # its end was told when it was given up
            num_choices = 1
            if request.beam is not None:
                num_choices = 0 if request.request_id in searches else request.n
                searches.add(request.request_id)
            assert seq.finish_reason is not None
            for _ in range(num_choices):
                self.observer.note_finished(
                    request,
                    executor,
                    seq.finish_reason,
                    took=now - request.arrival,
                    num_tokens=0 if request.beam is not None else seq.num_output_tokens,
                    error=outcome.errors.get(seq, ""),
                )

    def _finish(self, seq: Sequence, error: str) -> None:
        assert seq.finish_reason is not None
        request = seq.group.request
        stream = self._streams.get(request.request_id)
        if stream is None:
            return
        stream.stats.num_preemptions = seq.group.num_preemptions
        if request.beam is not None:
            stream.finish_all(seq.finish_reason, error)
            return
        last = seq.tokens[-1]
        stream.push_finish(
            seq.sample_index,
            seq.finish_reason,
            stop_token_id=last if seq.num_output_tokens and last in seq.stops else None,
            cumulative_logprob=seq.cumulative_logprob,
            error=error,
        )

    def _forget(self, request_id: str) -> None:
        stream = self._streams.pop(request_id)
        self._owners.pop(request_id)
        stream.stats.total_seconds = time.monotonic() - stream.request.arrival
        if stream.is_open:
            stream.fail(RequestFailed("the request ended without an end for every choice"))
        if not self._streams:
            self._idle.set()
