"""Metrics of a process: what there is, and what it is at a moment.

A service lists its metrics once, as `Metric`s, and gives a `Reading` of its own state when
somebody asks: nothing is counted beside the state, but for what is over once it happened
(`Histogram`). What the world sees is made from readings alone: Prometheus' text
(metrics_http.py) and OTLP (metrics_otlp.py) show the same values.

The state belongs to the service's event loop, and so does `Source.read`.
"""

from __future__ import annotations

import asyncio
import enum
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_NAME = re.compile(r"octavo(_[a-z0-9]+)+")
_TOTAL = "_total"
_UNITS_IN_NAMES = ("seconds", "bytes")
_OTHER = "other"

Labels = tuple[str, ...]


class MetricsError(Exception):
    """Metrics cannot be shown as the settings say; one line says what to do."""


class Kind(enum.Enum):
    """How a metric moves."""

    COUNTER = "counter"
    """A total that only grows while the process lives."""
    GAUGE = "gauge"
    """A value of this moment."""
    HISTOGRAM = "histogram"
    """How many observations there were up to each bound, their number and their sum."""


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric, as a service defines it.

    Attributes:
        name: as Prometheus shows it; a counter's ends in _total.
        kind: how it moves.
        unit: of its values, such as "seconds" or "blocks"; "" if it is 0 or 1.
        help: what it is, in a sentence.
        labels: names of its labels.
        buckets: upper bounds of a histogram, inclusive, ascending; one without bound follows.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Hold definitions to the conventions of Prometheus."""
        assert _NAME.fullmatch(self.name), self.name
        assert self.name.endswith(_TOTAL) == (self.kind is Kind.COUNTER), self.name
        assert bool(self.buckets) == (self.kind is Kind.HISTOGRAM), self.name
        assert list(self.buckets) == sorted(set(self.buckets)), self.name
        if self.unit in _UNITS_IN_NAMES:
            assert self.base_name.endswith(f"_{self.unit}"), self.name

    @property
    def base_name(self) -> str:
        """The name without _total, as OpenMetrics and OTLP have it."""
        return self.name.removesuffix(_TOTAL)


class Histogram:
    """Counts observations by bucket. For one thread: it has no lock.

    Invariant: `counts` has one entry more than `bounds`, for what is above all of them.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Start empty; `bounds` are inclusive and ascending."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, or several that are equal."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def copy(self) -> Histogram:
        """Give one that no later observation changes."""
        other = Histogram(self.bounds)
        other.counts = self.counts.copy()
        other.sum = self.sum
        return other


class Tally(dict[str, int]):
    """Counts by a label's value, of which there are at most `limit` and "other"."""

    def __init__(self, known: Iterable[str] = (), *, limit: int = 32) -> None:
        """Start with those that are known, so that they are seen before they happen."""
        super().__init__(dict.fromkeys(known, 0))
        self._limit = limit

    def note(self, value: str, count: int = 1) -> None:
        """Count one more, or several."""
        if value not in self and len(self) >= self._limit:
            value = _OTHER
        self[value] = self.get(value, 0) + count


class Reading:
    """The values of a service's metrics at a moment.

    Invariant: at most one value for a metric and its label values.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        """Start without values; `metrics` are all that may get one, in the order shown."""
        self._values: dict[Metric, dict[Labels, float | Histogram]] = {m: {} for m in metrics}

    def add(self, metric: Metric, value: float, *labels: str) -> None:
        """Give a counter's or gauge's value; values of the same labels add up."""
        assert metric.kind is not Kind.HISTOGRAM and len(labels) == len(metric.labels), metric.name
        of_metric = self._values[metric]
        before = of_metric.get(labels, 0)
        assert not isinstance(before, Histogram)
        of_metric[labels] = before + value

    def add_tally(self, metric: Metric, tally: Mapping[str, float]) -> None:
        """Give the values of a metric with one label."""
        for value, count in tally.items():
            self.add(metric, count, value)

    def put(self, metric: Metric, histogram: Histogram, *labels: str) -> None:
        """Give a histogram, as it is now."""
        assert metric.buckets == histogram.bounds and len(labels) == len(metric.labels), metric.name
        self._values[metric][labels] = histogram.copy()

    def numbers(self, metric: Metric) -> dict[Labels, float]:
        """Values of a counter or a gauge by its label values."""
        found = self._values[metric].items()
        return {labels: value for labels, value in found if not isinstance(value, Histogram)}

    def histograms(self, metric: Metric) -> dict[Labels, Histogram]:
        """Values of a histogram by its label values."""
        found = self._values[metric].items()
        return {labels: value for labels, value in found if isinstance(value, Histogram)}

    def __iter__(self) -> Iterator[Metric]:
        """Metrics that have a value."""
        return (metric for metric, values in self._values.items() if values)


class Source(Protocol):
    """What metrics are read from."""

    async def read(self) -> Reading:
        """Read the state. On the event loop that owns it, and in short pieces."""


def read_from_thread(
    source: Source, loop: asyncio.AbstractEventLoop, timeout_seconds: float
) -> Reading:
    """Read on the source's loop, from another thread.

    Raises:
        TimeoutError: if the loop does not come to it in time.
        RuntimeError: if the loop is closed.
    """
    reading = source.read()
    try:
        future = asyncio.run_coroutine_threadsafe(reading, loop)
    except RuntimeError:
        reading.close()
        raise
    try:
        return future.result(timeout_seconds)
    except TimeoutError:
        future.cancel()
        raise
