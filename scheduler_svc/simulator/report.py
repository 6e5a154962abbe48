"""What a simulation found: the same measures for every system that is simulated."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

_GROWTH = 1.02
_LOG_GROWTH = math.log(_GROWTH)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of seconds; all 0 if there was nothing to measure."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Sum up values; those that are not a number are left out."""
        ordered = sorted(value for value in values if not math.isnan(value))
        if not ordered:
            return cls()
        p50, p90, p99 = (ordered[int(share * len(ordered))] for share in (0.5, 0.9, 0.99))
        return cls(math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


class Sketch:
    """A distribution in bounded memory: buckets that are 2% wide, so quantiles are within 1%."""

    def __init__(self) -> None:
        """Start empty."""
        self._buckets: dict[int, int] = {}
        self._sum = 0.0
        self._max = 0.0
        self.count = 0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, at least 0, so many times."""
        key = math.ceil(math.log(value) / _LOG_GROWTH) if value > 1e-9 else -2000
        self._buckets[key] = self._buckets.get(key, 0) + count
        self._sum += value * count
        self.count += count
        self._max = max(self._max, value)

    def quantile(self, share: float) -> float:
        """Return the value below which this share of all lies; 0.0 if there is none."""
        wanted, seen = share * self.count, 0
        for key in sorted(self._buckets):
            seen += self._buckets[key]
            if seen >= wanted:
                middle = math.exp((key - 0.5) * _LOG_GROWTH) if key > -2000 else 0.0
                return min(middle, self._max)
        return 0.0

    def spread(self) -> Spread:
        """Sum up."""
        if not self.count:
            return Spread()
        p50, p90, p99 = (self.quantile(share) for share in (0.5, 0.9, 0.99))
        return Spread(self._sum / self.count, p50, p90, p99, self._max)


@dataclass(frozen=True, slots=True)
class KvUse:
    """Shares of all K/V slots, as means over the time in which a step runs; they add up to 1.

    Attributes:
        token_states: hold a token.
        internal: allocated, and never used.
        reserved: allocated, and used later.
        external: not allocated although a request waits.
        free: not allocated, and nobody waits. The prefix cache is in the last two.
    """

    token_states: float = 0.0
    internal: float = 0.0
    reserved: float = 0.0
    external: float = 0.0
    free: float = 1.0

    @property
    def of_allocated(self) -> float:
        """Slots that hold a token ÷ slots that are allocated."""
        allocated = self.token_states + self.internal + self.reserved
        return self.token_states / allocated if allocated else 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """All executors at one time."""

    seconds: float
    num_waiting: int
    num_running: int
    block_use: float
    num_executors: int
    num_output_tokens: int


class RequestTable:
    """What became of every request: columns by index; what has not happened is not a number.

    Attributes:
        arrival, admitted, first_token, end: seconds.
        num_prompt, num_output: tokens, of one sample.
        tenant: index into `tenants`.
        tenants: names.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.arrival, self.admitted = array("d"), array("d")
        self.first_token, self.end = array("d"), array("d")
        self.num_prompt, self.num_output = array("l"), array("l")
        self.tenant = array("l")
        self.tenants: list[str] = []
        self._by_name: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.arrival)

    def add(self, arrival: float, num_prompt: int, num_output: int, tenant: str) -> int:
        """Begin a row; returns its index."""
        number = self._by_name.get(tenant)
        if number is None:
            number = self._by_name[tenant] = len(self.tenants)
            self.tenants.append(tenant)
        self.arrival.append(arrival)
        for column in (self.admitted, self.first_token, self.end):
            column.append(math.nan)
        self.num_prompt.append(num_prompt)
        self.num_output.append(num_output)
        self.tenant.append(number)
        return len(self.arrival) - 1

    def latencies(self) -> tuple[Spread, Spread, Spread, Spread]:
        """Sum up: normalized latency, end to end, time to first token, wait for admission."""
        arrival = self.arrival
        e2e = array("d", (b - a for a, b in zip(arrival, self.end, strict=True)))
        normalized = (e / n for e, n in zip(e2e, self.num_output, strict=True))
        ttft = (b - a for a, b in zip(arrival, self.first_token, strict=True))
        wait = (b - a for a, b in zip(arrival, self.admitted, strict=True))
        return Spread.of(normalized), Spread.of(e2e), Spread.of(ttft), Spread.of(wait)


@dataclass(frozen=True, slots=True)
class Report:
    """What a simulation found.

    Attributes:
        system: what was simulated.
        num_requests: that arrived.
        num_finished: that got all they asked for.
        num_failed: that ended with an error.
        num_refused: that no queue took, or that never fit.
        num_unfinished: that were still there when the simulation was stopped.
        seconds: simulated, from the first arrival to the last end.
        busy_seconds: in which steps ran, of all executors together.
        num_steps: of all executors.
        num_prompt_tokens: asked for, by those that finished.
        num_output_tokens: generated for those that finished, all samples.
        num_computed_tokens: that went through the model, also again after a preemption.
        output_tokens_per_second: over `seconds`.
        requests_per_second: finished, over `seconds`.
        normalized_latency: arrival to end ÷ output tokens, seconds a token.
        e2e: arrival to end.
        ttft: arrival to first token; a beam search has its tokens at its end.
        itl: between two tokens of a sample.
        queue_wait: arrival to first admission.
        mean_batched_requests: that hold K/V while a step runs, mean over that time.
        mean_batched_sequences: that are in a step, likewise.
        kv: where the slots were.
        saved_by_sharing: blocks saved ÷ blocks that there would be without sharing.
        num_recompute_preemptions, num_swap_preemptions: sequences.
        num_copied_blocks: by copy-on-write.
        num_prefix_hit_tokens, num_prefix_query_tokens: of the prefix cache.
        num_deaths: executors that failed.
        num_moved: requests that went on on another executor.
        mean_executors, max_executors: that took requests.
        wall_seconds: that the simulation itself took.
        requests: what became of each.
        timeline: samples of all executors.
    """

    system: str
    num_requests: int
    num_finished: int
    num_failed: int
    num_refused: int
    num_unfinished: int
    seconds: float
    busy_seconds: float
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    output_tokens_per_second: float
    requests_per_second: float
    normalized_latency: Spread
    e2e: Spread
    ttft: Spread
    itl: Spread
    queue_wait: Spread
    mean_batched_requests: float
    mean_batched_sequences: float
    kv: KvUse
    saved_by_sharing: float
    num_recompute_preemptions: int
    num_swap_preemptions: int
    num_copied_blocks: int
    num_prefix_hit_tokens: int
    num_prefix_query_tokens: int
    num_deaths: int
    num_moved: int
    mean_executors: float
    max_executors: int
    wall_seconds: float
    requests: RequestTable = field(repr=False)
    timeline: list[Sample] = field(repr=False)

    def as_dict(self, *, wall: bool = True) -> dict[str, Any]:
        """Return all figures for JSON, without the tables.

        Args:
            wall: also the one figure that differs from run to run.
        """
        left_out = {"requests", "timeline"} if wall else {"requests", "timeline", "wall_seconds"}
        found: dict[str, Any] = {}
        for each in fields(self):
            if each.name in left_out:
                continue
            value = getattr(self, each.name)
            if is_dataclass(value):
                value = {f.name: _rounded(getattr(value, f.name)) for f in fields(value)}
            found[each.name] = _rounded(value)
        return found


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value
