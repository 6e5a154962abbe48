"""Where a new request goes: the service's own placement, and what it is compared with.

placement        the service's: tokens that are there less tokens that are cached
round-robin      one after the other
least-loaded     fewest tokens that are there
longest-prefix   most cached tokens, whatever the load; then the least loaded
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

from scheduler_svc import placement
from scheduler_svc.core import prefix_cache
from scheduler_svc.core.request import Request
from scheduler_svc.errors import NeverFits, QueueFull
from scheduler_svc.executor_session import ExecutorSession
from scheduler_svc.simulator.executor import SimExecutor


class Router(Protocol):
    """Gives a request to one of the executors of a scheduler."""

    def place(self, request: Request, executors: Sequence[SimExecutor]) -> SimExecutor:
        """Add the request to a core.

        Args:
            executors: that take requests, at least one.
        Raises:  QueueFull, NeverFits: if no core takes it.
        """


class Placement:
    """The service's own (scheduler_svc/placement.py), as it is."""

    def place(self, request: Request, executors: Sequence[SimExecutor]) -> SimExecutor:
        """Add the request where it costs least."""
        session = placement.place(request, as_sessions(executors))
        return cast(SimExecutor, session)


class RoundRobin:
    """One executor after the other."""

    def __init__(self) -> None:
        """Begin with the first."""
        self._next = 0

    def place(self, request: Request, executors: Sequence[SimExecutor]) -> SimExecutor:
        """Add the request to the next one that takes it."""
        first = self._next % len(executors)
        self._next += 1
        return _add_to_first(request, [*executors[first:], *executors[:first]])


class LeastLoaded:
    """The executor with the fewest tokens to come."""

    def place(self, request: Request, executors: Sequence[SimExecutor]) -> SimExecutor:
        """Add the request to the least loaded one that takes it."""
        return _add_to_first(request, sorted(executors, key=lambda each: each.load_tokens))


class LongestPrefix:
    """The executor that has most of the prompt, however busy it is."""

    def place(self, request: Request, executors: Sequence[SimExecutor]) -> SimExecutor:
        """Add the request to the one with the most cached tokens that takes it."""
        block_size = executors[0].core.state.config.block_size
        hashes = prefix_cache.prompt_hashes(request, block_size)

        def rank(executor: SimExecutor) -> tuple[int, int]:
            return -executor.core.num_cached_tokens(hashes), executor.load_tokens

        return _add_to_first(request, sorted(executors, key=rank), hashes)


ROUTERS: dict[str, Callable[[], Router]] = {
    "placement": Placement,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "longest-prefix": LongestPrefix,
}
"""Routers by name."""


def as_sessions(executors: Sequence[SimExecutor]) -> Sequence[ExecutorSession]:
    """Let placement take modelled executors: it uses their core, load_tokens and wake."""
    return cast(Sequence[ExecutorSession], executors)


def _add_to_first(
    request: Request, executors: Sequence[SimExecutor], hashes: Sequence[bytes] = ()
) -> SimExecutor:
    refusal: NeverFits | QueueFull | None = None
    for executor in executors:
        try:
            executor.core.add(request, hashes)
        except (NeverFits, QueueFull) as error:
            if refusal is None or isinstance(error, QueueFull):
                refusal = error
        else:
            return executor
    assert refusal is not None, "there is at least one executor"
    raise refusal
