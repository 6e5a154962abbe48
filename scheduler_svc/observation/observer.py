"""Who is told what happens to requests and steps, once, and tells all that show it.

The engine calls it on its event loop; nothing here waits. What is rare goes to the history
and to spans with its time; what is frequent is only counted.
"""

from __future__ import annotations

import time
from typing import Protocol

from scheduler_svc.core.events import Event, EventKind
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.observation.history import Happening, RequestHistory
from scheduler_svc.observation.latency import LatencyWindow
from scheduler_svc.observation.spans import Spans, Value
from scheduler_svc.observation.step_sample import StepSample


class Meter(Protocol):
    """What counts for metrics."""

    def note_step(self, executor: str, sample: StepSample) -> None:
        """A step was executed."""

    def note_queue_wait(self, seconds: float) -> None:
        """A request was admitted for the first time."""

    def note_first_token(self, seconds: float) -> None:
        """A request has its first token."""

    def note_later_tokens(self, seconds: float, count: int = 1) -> None:
        """So many sequences have a token again, after this time."""

    def note_end(self, reason: str, seconds: float) -> None:
        """A choice ended."""

    def note_refused(self, error_name: str) -> None:
        """A call ended with an error of `scheduler_svc.errors`."""


class NoMeter:
    """Counts nothing."""

    def note_step(self, executor: str, sample: StepSample) -> None:
        """Count nothing."""

    def note_queue_wait(self, seconds: float) -> None:
        """Count nothing."""

    def note_first_token(self, seconds: float) -> None:
        """Count nothing."""

    def note_later_tokens(self, seconds: float, count: int = 1) -> None:
        """Count nothing."""

    def note_end(self, reason: str, seconds: float) -> None:
        """Count nothing."""

    def note_refused(self, error_name: str) -> None:
        """Count nothing."""


class Observer:
    """The record of one scheduler.

    Attributes:
        history: stories of requests.
        ttft, itl: what streams saw lately.
        spans: the open ones.
        meter: counts for metrics.
    """

    def __init__(self, spans: Spans | None = None) -> None:
        """Record; spans are made if there is somebody for them."""
        self.history = RequestHistory()
        self.ttft = LatencyWindow(time.monotonic)
        self.itl = LatencyWindow(time.monotonic)
        self.spans = spans or Spans()
        self.meter: Meter = NoMeter()

    def note_submitted(self, request: Request, executor: str) -> None:
        """A request was accepted and waits at an executor."""
        self.history.open(request, self.spans.trace_id(request.request_id))
        num_tokens = sum(len(tokens) for tokens in request.resumed.values())
        detail = "the client resumes it with the tokens it has" if request.resumed else ""
        self._note(request, EventKind.QUEUED, executor, detail=detail, num_tokens=num_tokens)

    def note_admitted(self, group: SequenceGroup, executor: str, waited: float) -> None:
        """A group got its first place, after so many seconds."""
        self.meter.note_queue_wait(waited)
        cached = group.cached_prompt_tokens
        self._note(group.request, EventKind.ADMITTED, executor, num_tokens=cached)

    def note_event(self, event: Event, executor: str) -> None:
        """Something rare happened in a core."""
        self._note(
            event.group.request,
            event.kind,
            executor,
            other=event.other_request_id,
            detail=event.detail,
            num_tokens=event.num_tokens,
        )

    def note_first_token(self, request: Request, executor: str, waited: float) -> None:
        """A request's first token is here."""
        self.ttft.add(waited)
        self.meter.note_first_token(waited)
        self._note(request, EventKind.FIRST_TOKEN, executor)

    def note_later_tokens(self, waited: float, count: int) -> None:
        """So many sequences have a token again, after so many seconds."""
        self.itl.add(waited, count)
        self.meter.note_later_tokens(waited, count)

    def note_finished(
        self,
        request: Request,
        executor: str,
        reason: FinishReason,
        *,
        took: float,
        num_tokens: int,
        error: str = "",
    ) -> None:
        """A choice ended with so many tokens, so many seconds after its request came."""
        self.meter.note_end(reason.value, took)
        detail = f"{reason.value}: {error}" if error else reason.value
        self._note(request, EventKind.FINISHED, executor, detail=detail, num_tokens=num_tokens)

    def _note(
        self,
        request: Request,
        kind: EventKind,
        executor: str,
        *,
        other: str = "",
        detail: str = "",
        num_tokens: int = 0,
    ) -> None:
        now = time.time_ns()
        happening = Happening(kind, now, executor, other, detail, num_tokens)
        self.history.note(request.request_id, happening)
        told: dict[str, Value] = {
            "executor": executor,
            "other_request_id": other,
            "detail": detail,
            "num_tokens": num_tokens,
        }
        self.spans.note(request.request_id, kind.value, now, told)
