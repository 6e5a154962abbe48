"""The stories of the latest requests: what happened to each, and when.

Bounded twice: of a story the first and the last events are kept, of the stories the latest.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from scheduler_svc.core.events import EventKind
from scheduler_svc.core.request import Request

MAX_STORIES = 4096
_MAX_EVENTS = 65_536
_KEPT_AT_EITHER_END = 64


@dataclass(frozen=True, slots=True)
class Happening:
    """An event with its time and place.

    Attributes:
        kind: what happened.
        time_unix_ns: when, in nanoseconds since 1970.
        executor: address; "" is none.
        other_request_id: who caused it; "" is nobody.
        detail: for people.
        num_tokens: what the kind says of it.
    """

    kind: EventKind
    time_unix_ns: int
    executor: str = ""
    other_request_id: str = ""
    detail: str = ""
    num_tokens: int = 0


@dataclass(slots=True)
class Story:
    """What happened to one request, in order of time."""

    request_id: str
    tenant: str
    priority: int
    num_prompt_tokens: int
    trace_id: str = ""
    num_generated_tokens: int = 0
    num_dropped: int = 0
    _first: list[Happening] = field(default_factory=list)
    _last: deque[Happening] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._first) + len(self._last)

    def __iter__(self) -> Iterator[Happening]:
        return chain(self._first, self._last)

    def add(self, happening: Happening) -> bool:
        """Go on; False if one in the middle had to go for it."""
        if len(self._first) < _KEPT_AT_EITHER_END:
            self._first.append(happening)
            return True
        self._last.append(happening)
        if len(self._last) <= _KEPT_AT_EITHER_END:
            return True
        self._last.popleft()
        self.num_dropped += 1
        return False


class RequestHistory:
    """Stories by request id; of requests that had the same id, the latest one's."""

    def __init__(self, max_stories: int = MAX_STORIES, max_events: int = _MAX_EVENTS) -> None:
        """Remember so many requests, and so many events in all."""
        self._stories: OrderedDict[str, Story] = OrderedDict()
        self._max_stories = max_stories
        self._max_events = max_events
        self._num_events = 0

    def __len__(self) -> int:
        return len(self._stories)

    def open(self, request: Request, trace_id: str) -> None:
        """Begin a request's story."""
        before = self._stories.pop(request.request_id, None)
        if before is not None:
            self._num_events -= len(before)
        self._stories[request.request_id] = Story(
            request.request_id,
            request.tenant,
            request.priority,
            len(request.prompt_tokens),
            trace_id,
        )
        self._forget()

    def note(self, request_id: str, happening: Happening) -> None:
        """Tell what happened to a request; it is lost if the story is forgotten."""
        story = self._stories.get(request_id)
        if story is None:
            return
        if story.add(happening):
            self._num_events += 1
            self._forget()
        if happening.kind is EventKind.FINISHED:
            story.num_generated_tokens += happening.num_tokens

    def find(self, request_id: str) -> Story | None:
        """Give a request's story."""
        return self._stories.get(request_id)

    def _forget(self) -> None:
        while len(self._stories) > self._max_stories or self._num_events > self._max_events:
            _, story = self._stories.popitem(last=False)
            self._num_events -= len(story)
