"""What came back, and the arithmetic over it.

Definitions, all seconds on the client's clock:
    TTFT        from sending to the first token.
    ITL         between one token of a choice and the next. A delta that carries k tokens
                after a gap g counts as k gaps of g / k: their true times are unknown, and
                so the sum stays true. Tokens of a choice's first delta have no gap.
    e2e         from sending to the end.
    normalized  e2e divided by the output tokens (of one choice).
    goodput     requests per second that met the SLO: TTFT at most slo_ttft and mean ITL at
                most slo_itl.
Rates divide by the time from the first sending to the last end, over requests that came
back whole. Percentiles interpolate linearly between the closest ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from octavo_client.bench.workload import Request


@dataclass(slots=True)
class Record:
    """What happened to one request. Times are seconds from the start of the run.

    Attributes:
        arrivals: per choice, (time, number of tokens) of each delta.
        num_output_tokens: over all choices, as the server counted; None: it did not say.
        error: one line, if it failed.
    """

    request: Request
    num_choices: int = 1
    sent_at: float = 0.0
    ended_at: float = 0.0
    arrivals: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    num_output_tokens: int | None = None
    error: str | None = None

    def add(self, index: int, now: float, num_tokens: int) -> None:
        """Tokens of one choice came."""
        if num_tokens:
            self.arrivals.setdefault(index, []).append((now, num_tokens))

    @property
    def num_received(self) -> int:
        """Output tokens over all choices: the server's count, or those seen."""
        if self.num_output_tokens is not None:
            return self.num_output_tokens
        return sum(count for deltas in self.arrivals.values() for _, count in deltas)

    @property
    def is_whole(self) -> bool:
        """Whether it succeeded with exactly the length asked for."""
        wanted = self.request.num_output_tokens * self.num_choices
        return self.error is None and self.num_received == wanted

    @property
    def ttft(self) -> float:
        """Seconds to the first token; infinite if none came."""
        firsts = [deltas[0][0] for deltas in self.arrivals.values()]
        return min(firsts) - self.sent_at if firsts else math.inf

    @property
    def e2e(self) -> float:
        """Seconds to the end."""
        return self.ended_at - self.sent_at

    @property
    def gaps(self) -> list[float]:
        """Every ITL of every choice."""
        return [gap for deltas in self.arrivals.values() for gap in token_gaps(deltas)]


def token_gaps(deltas: Sequence[tuple[float, int]]) -> list[float]:
    """Spread the gap before each delta over the tokens in it."""
    gaps: list[float] = []
    for (before, _), (now, count) in pairwise(deltas):
        gaps += [(now - before) / count] * count
    return gaps


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly between the closest ranks.

    Raises:
        ValueError: if there are no values, or percent is not from 0 to 100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError("need at least one value, and percent from 0 to 100")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of one measure, seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """Sum values up; None if there are none."""
        found = list(values)
        if not found:
            return None
        return cls(
            mean=math.fsum(found) / len(found),
            p50=percentile(found, 50),
            p90=percentile(found, 90),
            p99=percentile(found, 99),
            max=max(found),
        )


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet to count as good, seconds."""

    ttft: float
    itl: float

    def is_met(self, record: Record) -> bool:
        """Whether a whole request met both bounds."""
        gaps = record.gaps
        mean_gap = math.fsum(gaps) / len(gaps) if gaps else 0.0
        return record.is_whole and record.ttft <= self.ttft and mean_gap <= self.itl


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in numbers; see the module's definitions.

    Attributes:
        num_wrong_length: succeeded, but not with the length asked for.
        max_send_lag: how late this generator itself was in sending, at worst; if it is not
            small, the load was not what the workload says.
    """

    num_requests: int
    num_whole: int
    num_failed: int
    num_wrong_length: int
    duration: float
    num_prompt_tokens: int
    num_output_tokens: int
    output_tokens_per_second: float
    total_tokens_per_second: float
    requests_per_second: float
    goodput: float
    slo_share: float
    slo: Slo
    max_send_lag: float
    ttft: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    normalized: Distribution | None

    def to_json(self) -> dict[str, Any]:
        """Plain values, seconds and counts."""
        return asdict(self)


def summarize(records: Sequence[Record], slo: Slo, *, max_send_lag: float = 0.0) -> Summary:
    """Do the arithmetic of one run."""
    whole = [record for record in records if record.is_whole]
    failed = [record for record in records if record.error is not None]
    begin = min((record.sent_at for record in records), default=0.0)
    duration = max((record.ended_at for record in records), default=0.0) - begin
    num_prompt = sum(len(record.request.prompt) for record in whole)
    num_output = sum(record.num_received for record in whole)
    num_good = sum(slo.is_met(record) for record in whole)

    def rate(count: float) -> float:
        return count / duration if duration > 0 else 0.0

    return Summary(
        num_requests=len(records),
        num_whole=len(whole),
        num_failed=len(failed),
        num_wrong_length=len(records) - len(whole) - len(failed),
        duration=duration,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        output_tokens_per_second=rate(num_output),
        total_tokens_per_second=rate(num_prompt + num_output),
        requests_per_second=rate(len(whole)),
        goodput=rate(num_good),
        slo_share=num_good / len(records) if records else 0.0,
        slo=slo,
        max_send_lag=max_send_lag,
        ttft=Distribution.of(record.ttft for record in whole),
        itl=Distribution.of(gap for record in whole for gap in record.gaps),
        e2e=Distribution.of(record.e2e for record in whole),
        normalized=Distribution.of(
            record.e2e / record.request.num_output_tokens for record in whole
        ),
    )
