"""What a scheduler does per second, from the counters of its snapshots. No I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, fields

from octavo_client._state import Counters, Snapshot

_NAMES = tuple(field.name for field in fields(Counters))


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, over the executors of a scheduler.

    Attributes:
        prefix_hit_rate: share of the prompt tokens of these seconds that the prefix cache had,
            or, if there were none, of all prompts; None: there was no prompt yet.
    """

    generated_tokens: float
    prompt_tokens: float
    finished: float
    preemptions: float
    copied_blocks: float
    prefix_hit_rate: float | None


class RateWindow:
    """The counters of the last few seconds.

    Invariant: holds snapshots of one life of one scheduler only, in order of time.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        self._ns = round(seconds * 1e9)
        self._seen: deque[tuple[int, dict[str, int]]] = deque()

    def add(self, snapshot: Snapshot) -> Rates | None:
        """Take a snapshot in; give the rates up to it, None before there are two."""
        sums = {
            name: sum(getattr(executor.counters, name) for executor in snapshot.executors)
            for name in _NAMES
        }
        now = snapshot.time_unix_ns
        if self._seen and self._is_other(now, sums):
            self._seen.clear()
        self._seen.append((now, sums))
        while len(self._seen) > 2 and self._seen[1][0] <= now - self._ns:
            self._seen.popleft()
        return self._rates() if len(self._seen) > 1 else None

    def _is_other(self, now: int, sums: dict[str, int]) -> bool:
        """Whether counters fell: another scheduler answers, or an executor has left."""
        before, last = self._seen[-1]
        return now <= before or any(sums[name] < last[name] for name in _NAMES)

    def _rates(self) -> Rates:
        (begin, first), (end, last) = self._seen[0], self._seen[-1]
        seconds = (end - begin) / 1e9
        grown = {name: last[name] - first[name] for name in _NAMES}
        queried = grown if grown["num_prefix_query_tokens"] else last
        num_queries = queried["num_prefix_query_tokens"]
        num_preemptions = grown["num_recompute_preemptions"] + grown["num_swap_preemptions"]
        return Rates(
            generated_tokens=grown["num_generated_tokens"] / seconds,
            prompt_tokens=grown["num_prompt_tokens"] / seconds,
            finished=grown["num_finished"] / seconds,
            preemptions=num_preemptions / seconds,
            copied_blocks=grown["num_copied_blocks"] / seconds,
            prefix_hit_rate=queried["num_prefix_hit_tokens"] / num_queries if num_queries else None,
        )
