"""Where a request goes: to its cached beginning, unless that executor is much busier."""

from __future__ import annotations

from typing import Any

from scheduler_svc import placement
from scheduler_svc.core import prefix_cache
from tests.support.core_builders import make_harness, make_request
from tests.support.core_harness import CoreHarness

PROMPT = list(range(1, 33))


class Session:
    """All that placement wants of one: a core and its load."""

    def __init__(self) -> None:
        self.harness: CoreHarness = make_harness(block_size=4, num_blocks=200, max_queue=9)
        self.core = self.harness.core

    @property
    def load_tokens(self) -> int:
        return self.core.state.load_tokens


def place(name: str, sessions: list[Session], **fields: Any) -> int:
    """Which of the sessions got the request."""
    request = make_request(name, **fields)
    session: Any = placement.place(request, sessions)  # type: ignore[arg-type]
    return sessions.index(session)


def warm(session: Session) -> None:
    """Let the prompt be computed there, and be gone."""
    session.harness.add(make_request("warm", PROMPT, max_tokens=1))
    session.harness.drain()
    assert session.load_tokens == 0


def test_a_request_goes_to_its_cached_beginning() -> None:
    """Until what is to be computed there is more than twice what is cached."""
    sessions = [Session(), Session()]
    warm(sessions[1])
    request = make_request("r", PROMPT, max_tokens=4)
    num_cached = sessions[1].core.num_cached_tokens(prefix_cache.prompt_hashes(request, 4))
    assert num_cached in (28, 32)
    assert place("a", sessions, prompt=PROMPT, max_tokens=4) == 1
    assert sessions[1].load_tokens == 32 - num_cached + 4
    filler = 2 * num_cached - sessions[1].load_tokens
    sessions[1].core.add(make_request("filler", 1, max_tokens=filler - 2))
    assert place("b", sessions, prompt=PROMPT, max_tokens=4) == 1
    assert place("c", sessions, prompt=PROMPT, max_tokens=4) == 0


def test_without_the_cache_the_least_busy_one_is_taken() -> None:
    """Also if another one has the prompt."""
    sessions = [Session(), Session()]
    warm(sessions[1])
    sessions[1].core.add(make_request("busy", 1, max_tokens=1))
    assert place("a", sessions, prompt=PROMPT, max_tokens=4, use_cache=False) == 0


def test_what_was_cached_counts_in_full_once_the_request_moves() -> None:
    """The other executor has nothing of it."""
    sessions = [Session(), Session()]
    warm(sessions[1])
    place("a", sessions, prompt=PROMPT, max_tokens=4)
    (group,) = sessions[1].core.evacuate()
    assert sessions[1].load_tokens == 0
    assert group.num_uncached_tokens == 32
