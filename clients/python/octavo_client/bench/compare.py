"""Compare servers: one workload, each peer in turn, A B A B ….

An absolute time on a shared machine is noise. So each round gives every peer one turn,
in the same order, and what is reported is the median over the rounds and its ratio to the
first peer's. Only one peer that this starts lives at a time: two servers never share the
cores.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from octavo_client.bench.measure import Slo, Summary
from octavo_client.bench.run import Run
from octavo_client.bench.targets import Target
from octavo_client.bench.workload import Request
from octavo_client.errors import OctavoError

Send = Callable[[Target, Sequence[Request]], Awaitable[Run]]


@dataclass(frozen=True, slots=True)
class Load:
    """What every peer gets.

    Attributes:
        requests: the workload.
        warm_up: sent before it, unmeasured; empty: nothing is.
        slo: for goodput.
        timeout_seconds: deadline of each request.
        send: sends requests to a target that is entered.
        check: raises OctavoError if the workload does not suit what a server says of itself.
    """

    requests: Sequence[Request]
    warm_up: Sequence[Request]
    slo: Slo
    timeout_seconds: float
    send: Send
    check: Callable[[Sequence[Request], dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Turn:
    """One peer's turn in one round.

    Attributes:
        summary: the run in numbers; None if the turn failed.
        failures: each kind of failed request once, with its count.
        server: what the peer says of itself.
        ready_seconds: from its start to its readiness; None: this did not start it.
        peak_rss_bytes: of all its processes; None: unknown.
        error: one line, if the turn failed.
    """

    summary: Summary | None = None
    failures: tuple[str, ...] = ()
    server: dict[str, Any] = field(default_factory=dict)
    ready_seconds: float | None = None
    peak_rss_bytes: int | None = None
    error: str | None = None

    @property
    def num_bad(self) -> int:
        """Requests that failed or came back with the wrong length."""
        return self.summary.num_failed + self.summary.num_wrong_length if self.summary else 0


class Peer(Protocol):
    """Something that can take a turn."""

    @property
    def name(self) -> str:
        """Its name in the report."""

    async def take_turn(self, load: Load, say: Callable[[str], None]) -> Turn:
        """Start if need be, run the load, stop again.

        Args:
            load: what to run.
            say: called with what is being waited for.

        Raises: OctavoError: if the turn fails.
        """


@dataclass(frozen=True, slots=True)
class Comparison:
    """All turns so far of all peers, in the peers' order. A peer that failed has fewer turns."""

    names: tuple[str, ...]
    turns: dict[str, list[Turn]]

    @classmethod
    def of(cls, peers: Sequence[Peer]) -> Self:
        """Begin without turns."""
        names = tuple(peer.name for peer in peers)
        return cls(names, {name: [] for name in names})

    @property
    def is_empty(self) -> bool:
        """No turn has ended yet."""
        return not any(self.turns.values())

    @property
    def has_failed(self) -> bool:
        """Whether any turn of any peer failed as a whole."""
        return any(turn.error is not None for turns in self.turns.values() for turn in turns)

    @property
    def num_bad(self) -> int:
        """Requests of all turns that failed or came back with the wrong length."""
        return sum(turn.num_bad for turns in self.turns.values() for turn in turns)


def schedule(names: Sequence[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    """Yield (round from 1, name): every peer once, then every peer again."""
    for number in range(1, num_rounds + 1):
        for name in names:
            yield number, name


async def compare(
    peers: Sequence[Peer],
    load: Load,
    *,
    num_rounds: int,
    on_start: Callable[[int, str], None] = lambda *_: None,
    on_wait: Callable[[str], None] = lambda _: None,
    on_end: Callable[[str, Turn], None] = lambda *_: None,
    into: Comparison | None = None,
) -> Comparison:
    """Give every peer its turns; one that fails gets no more, and the others go on.

    Turns are added to `into` as they end, so that who is interrupted has them.
    """
    by_name = {peer.name: peer for peer in peers}
    comparison = Comparison.of(peers) if into is None else into
    turns = comparison.turns
    for number, name in schedule(tuple(by_name), num_rounds):
        if any(turn.error is not None for turn in turns[name]):
            continue
        on_start(number, name)
        try:
            turn = await by_name[name].take_turn(load, on_wait)
        except OctavoError as error:
            turn = Turn(error=" ".join(str(error).split()))
        turns[name].append(turn)
        on_end(name, turn)
    return comparison


def warm_up_for(requests: Sequence[Request]) -> list[Request]:
    """Return one short request that leaves nothing in a prefix cache for the workload.

    Its prompt is the first one's, backwards.
    """
    first = requests[0]
    length = min(first.num_output_tokens, 8)
    return [Request("warm-up", tuple(reversed(first.prompt)), length)]
