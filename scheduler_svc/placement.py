"""Which executor runs a request: a new one, and one whose executor is gone.

The cost of a place is the tokens that are still to be computed there, and those of the prompt
that its prefix cache lacks. The latter count twice: elsewhere they are computed, and then take
the room of what others have cached.
So the longest cached prefix wins, unless its executor is that much busier than another one.
docs/reproduction/beyond.md has what this gains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scheduler_svc.core import prefix_cache
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.errors import NeverFits, QueueFull
from scheduler_svc.executor_session import ExecutorSession

_Hashes = dict[int, list[bytes]]

_WORTH_OF_CACHED = 2
"""In simulations of shared prefixes 1 finds fewer of them; without a bound for the load,
the executor of a text that all ask for has them all."""


def place(request: Request, sessions: Sequence[ExecutorSession]) -> ExecutorSession:
    """Add a request to the best core that can take it.

    Args:
        request: a validated one.
        sessions: at least one, all with a core.
    Raises:  QueueFull: if one could later; NeverFits: if none ever can.
    """
    hashes: _Hashes = {}
    refusal: NeverFits | QueueFull | None = None
    for session in _best_first(request, sessions, hashes):
        core = _core(session)
        try:
            core.add(request, hashes.get(core.state.config.block_size, ()))
        except (NeverFits, QueueFull) as error:
            if refusal is None or isinstance(error, QueueFull):
                refusal = error
        else:
            return session
    assert refusal is not None
    raise refusal


def move(
    source: ExecutorSession,
    targets: Sequence[ExecutorSession],
    note_place: Callable[[str, ExecutorSession], None],
) -> int:
    """Take a session's groups to other ones; those that fit nowhere else stay in its core.

    The session's stream must have ended, or end now.

    Args:
        source: whose groups move.
        targets: where they may go.
        note_place: told where each request is now.
    Returns: how many groups moved.
    """
    core = _core(source)
    num_moved = 0
    for group in core.evacuate():
        session = _adopt(group, targets)
        if session is None:
            core.adopt(group)
            continue
        num_moved += 1
        note_place(group.request.request_id, session)
        session.wake()
    return num_moved


def fits_elsewhere(source: ExecutorSession, targets: Sequence[ExecutorSession]) -> bool:
    """Say whether every group of a session fits one of the others."""
    groups = _core(source).state.groups.values()
    return all(any(_core(t).can_hold(group) for t in targets) for group in groups)


def _adopt(group: SequenceGroup, targets: Sequence[ExecutorSession]) -> ExecutorSession | None:
    for session in _best_first(group.request, targets, {}):
        if _core(session).can_hold(group):
            _core(session).adopt(group)
            return session
    return None


def _best_first(
    request: Request, sessions: Sequence[ExecutorSession], hashes: _Hashes
) -> list[ExecutorSession]:
    if len(sessions) == 1:
        return list(sessions)
    return sorted(sessions, key=lambda session: _cost(request, session, hashes))


def _cost(request: Request, session: ExecutorSession, hashes: _Hashes) -> int:
    """Tokens to compute there, the cached ones weighed; fills in `hashes` by block size."""
    core = _core(session)
    num_cached = 0
    if request.use_cache and core.state.config.prefix_cache:
        block_size = core.state.config.block_size
        if block_size not in hashes:
            hashes[block_size] = prefix_cache.prompt_hashes(request, block_size)
        num_cached = core.num_cached_tokens(hashes[block_size])
    return session.load_tokens - _WORTH_OF_CACHED * num_cached


def _core(session: ExecutorSession) -> Scheduler:
    assert session.core is not None
    return session.core
