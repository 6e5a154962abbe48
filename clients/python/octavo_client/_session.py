"""One request over as many calls as it takes: what to send, what to pass on, when to give up.

Sans-IO: the clients open calls and sleep; all decisions about retrying and resuming are
here. A stream that broke after tokens came is resumed: the next call brings the tokens
received and the seed in use, and the service goes on after them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.v1 import inference_pb2

from octavo_client._protocol import parse_event
from octavo_client._retry import RetryPolicy, Turns
from octavo_client._tracing import CallSpan
from octavo_client._types import Delta, Event, Finished, FinishReason, Started, Usage
from octavo_client.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    OctavoError,
    Unavailable,
)

_MAX_REQUEST_ID_CHARS = 128
_PROVISIONAL = (FinishReason.CANCELLED, FinishReason.ERROR)
_TIMER_SECONDS = 0.05  # gRPC's timer may fire so much before ours


@dataclass(slots=True)
class _Choice:
    """What was passed on of one choice."""

    token_ids: list[int] = field(default_factory=list)
    echo_call: int = 0  # number of the call that brought the echo; 0: none yet
    finished: Finished | None = None


class Session:
    """State of one request across calls.

    Invariant: the events passed on form one unbroken stream (a Started, deltas without a
    gap or a repeat, one Finished per choice, a Usage), however many calls it took.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        policy: RetryPolicy,
        *,
        has_replicas: bool = False,
        span: CallSpan | None = None,
    ) -> None:
        """`has_replicas`: whether another call may reach another process; `span` ends with it."""
        self._request = request
        self._policy = policy
        self._turns = Turns(policy, has_replicas=has_replicas)
        self._choices: dict[int, _Choice] = {}
        self._span = span or CallSpan(None)
        self._started: Started | None = None
        # A finish by cancellation or error is held back until the call's status is known:
        # a draining service ends its choices so, and then says UNAVAILABLE.
        self._held: list[Event] = []
        self._usage_seen = False
        self._num_calls = 0
        self._num_turns = 0
        self._num_broken = 0  # calls since a token came
        self._num_failures = 0  # rounds of them
        self._failing_since: float | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether any token was passed on."""
        return any(choice.token_ids for choice in self._choices.values())

    @property
    def is_new_outage(self) -> bool:
        """Whether the last failure was the first since a token came, or since the begin."""
        return self._num_broken == 1

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        done = [choice for choice in self._choices.values() if choice.finished]
        return len(done) >= max(self._request.n, 1)

    def next_request(self) -> inference_pb2.GenerateRequest:
        """Return what to send on the next call."""
        self._num_calls += 1
        self._held.clear()
        if self._num_calls == 1:
            return self._request
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        if request.request_id:
            # The broken call may still be live at the service, under the old id.
            suffix = f".r{self._num_calls - 1}"
            request.request_id = request.request_id[: _MAX_REQUEST_ID_CHARS - len(suffix)] + suffix
        if self._started is not None:
            request.sampling.seed = self._started.seed
        for index, choice in sorted(self._choices.items()):
            if choice.token_ids:
                request.resume.add(index=index, token_ids=choice.token_ids)
        return request

    def receive(self, response: inference_pb2.GenerateResponse) -> tuple[Event, ...]:
        """Take in one response; return the events to pass on."""
        event = parse_event(response)
        match event:
            case Started():
                if self._started is not None:
                    return ()
                self._started = event
                self._span.note_started(event.request_id, event.model)
                return (event,)
            case Delta():
                return self._receive_delta(event)
            case Finished():
                return self._receive_finished(event)
            case Usage():
                self._held.append(event)
        return ()

    def _receive_delta(self, delta: Delta) -> tuple[Event, ...]:
        choice = self._choices.setdefault(delta.index, _Choice())
        if choice.finished is not None:
            return ()
        if delta.is_prompt:
            choice.echo_call = choice.echo_call or self._num_calls
            return (delta,) if choice.echo_call == self._num_calls else ()
        if not delta.token_ids and not delta.text:
            return ()
        choice.token_ids.extend(delta.token_ids)
        self._num_broken = 0
        self._num_failures = 0
        self._failing_since = None
        return (delta,)

    def _receive_finished(self, event: Finished) -> tuple[Event, ...]:
        choice = self._choices.setdefault(event.index, _Choice())
        if choice.finished is not None:
            return ()
        if event.reason in _PROVISIONAL:
            self._held.append(event)
            return ()
        choice.finished = event
        return (event,)

    def finish(self) -> tuple[Event, ...]:
        """The call ended well; return the last events.

        Raises:
            Internal: if a choice has no end.
        """
        events = self._release()
        if self._started is None or not self.is_complete:
            error = Internal("the service ended the stream before every choice was finished")
            self._span.end(error)
            raise error
        self._span.end()
        if not self._usage_seen:
            events = (*events, self._own_usage())
        return events

    def _release(self) -> tuple[Event, ...]:
        """Pass on what was held back, since no further call will replace it."""
        events = tuple(self._held)
        self._held.clear()
        for event in events:
            if isinstance(event, Finished):
                self._choices[event.index].finished = event
            self._usage_seen |= isinstance(event, Usage)
        return events

    def _own_usage(self) -> Usage:
        ends = [choice.finished for choice in self._choices.values() if choice.finished]
        return Usage(
            num_prompt_tokens=self._started.num_prompt_tokens if self._started else 0,
            num_completion_tokens=sum(end.num_tokens for end in ends),
        )

    def cancel(self) -> None:
        """The caller wants no more."""
        self._span.end(is_cancelled=True)

    def give_up(self, error: OctavoError) -> None:
        """There will be no further call, because of this."""
        self._span.end(error)

    def after_failure(self, error: OctavoError, now: float) -> float | None:
        """The call failed; say what next.

        Args:
            error: what it failed with.
            now: monotonic time, seconds.
        Returns: seconds to wait before the next call; None: the answer is complete anyway
            (only the usage was lost), end with `finish`.
        Raises: error, if it is not worth another call.
        """
        if isinstance(error, Cancelled):
            # We did not cancel: the service's side went away in mid-call.
            error = Unavailable(str(error))
        if self.is_complete and isinstance(error, Unavailable):
            return None
        if not self._policy.covers(error, has_tokens=self.has_tokens):
            self.give_up(error)
            raise error
        self._span.note_retry(error)
        self._num_broken += 1
        if self._turns.take(error):
            self._num_turns += 1
            return 0.0
        self._num_failures += 1
        delay = self._policy.delay(self._num_failures, error.retry_after)
        if self.has_tokens:
            if self._failing_since is None:
                self._failing_since = now
            if now + delay - self._failing_since > self._policy.resume_seconds:
                self.give_up(error)
                raise error
        elif self._num_calls - self._num_turns >= self._policy.max_attempts:
            self.give_up(error)
            raise error
        return delay


def name_deadline(error: OctavoError, now: float, deadline: float, seconds: float) -> OctavoError:
    """Say in our own words that the deadline cut a call: gRPC's vary, and so do its codes.

    Args:
        error: what the call failed with.
        now, deadline: monotonic time, seconds.
        seconds: how long the deadline allowed in all.
    Returns: DeadlineExceeded if the deadline was the cause; else the error itself.
    """
    is_past = now >= deadline - _TIMER_SECONDS
    if isinstance(error, DeadlineExceeded) or (
        is_past and not error.reason and isinstance(error, Cancelled | Internal | Unavailable)
    ):
        return DeadlineExceeded(f"the deadline of {seconds:g} s passed")
    return error
