"""What happens to a request on its way, for people who ask why it was slow.

The core says what happened, in order, and to whom; it has no clock, so whoever takes the
outcome says when. Only what is rare is an event: tokens are none.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_svc.core.sequence import SequenceGroup


class EventKind(enum.Enum):
    """What happened; the message of the same name says more of each."""

    QUEUED = "queued"
    BLOCKED = "blocked"
    ADMITTED = "admitted"
    FIRST_TOKEN = "first_token"
    PREEMPTED_RECOMPUTE = "preempted_recompute"
    PREEMPTED_SWAP = "preempted_swap"
    SWAPPED_IN = "swapped_in"
    RESUMED = "resumed"
    EXECUTOR_LOST = "executor_lost"
    MOVED = "moved"
    FINISHED = "finished"


class Blocked(enum.Enum):
    """Why the group that is next in line cannot have a place."""

    BUDGET = "the step's budget of tokens is spent on those before it"
    ROWS = "too many sequences run"
    BLOCKS = "too few KV blocks are free"
    SUSPECT = "an executor failed with it or died under it, so it runs apart from others like it"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to one request.

    Attributes:
        kind: what.
        group: to whom.
        other_request_id: who caused it; "" is nobody.
        detail: for people.
        num_tokens: what the kind says of it.
    """

    kind: EventKind
    group: SequenceGroup
    other_request_id: str = ""
    detail: str = ""
    num_tokens: int = 0
