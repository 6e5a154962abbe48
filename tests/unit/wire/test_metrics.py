"""Definitions, histograms and readings of metrics."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.metrics import Histogram, Kind, Metric, Reading, Tally, read_from_thread
from prometheus_client import Histogram as PrometheusHistogram

BOUNDS = (0.001, 0.01, 0.5, 1.0, 8.0)
WAIT = 20.0
COUNTER = Metric("octavo_test_things_total", Kind.COUNTER, "things", "Things.", ("kind",))
GAUGE = Metric("octavo_test_level", Kind.GAUGE, "", "Level.")
HISTOGRAM = Metric("octavo_test_wait_seconds", Kind.HISTOGRAM, "seconds", "Wait.", (), BOUNDS)


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 20)), max_size=50))
def test_a_histogram_counts_as_prometheus_does(values: list[float]) -> None:
    """Bucket by bucket, bounds included, with the same sum."""
    ours = Histogram(BOUNDS)
    theirs = PrometheusHistogram("x", "x", buckets=BOUNDS, registry=None)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    samples = [sample for family in theirs.collect() for sample in family.samples]
    up_to = [int(sample.value) for sample in samples if sample.name == "x_bucket"]
    assert [sum(ours.counts[: at + 1]) for at in range(len(ours.counts))] == up_to
    assert ours.count == len(values)
    assert ours.sum == next(sample.value for sample in samples if sample.name == "x_sum")


def test_equal_values_are_counted_at_once() -> None:
    """As if each had been observed."""
    at_once, one_by_one = Histogram(BOUNDS), Histogram(BOUNDS)
    at_once.observe(0.25, count=3)
    for _ in range(3):
        one_by_one.observe(0.25)
    assert at_once.counts == one_by_one.counts == [0, 0, 3, 0, 0, 0]
    assert at_once.sum == one_by_one.sum == 0.75


def test_a_reading_is_of_its_moment() -> None:
    """What is observed later does not change it."""
    histogram = Histogram(BOUNDS)
    histogram.observe(0.1)
    reading = Reading([HISTOGRAM])
    reading.put(HISTOGRAM, histogram)
    histogram.observe(0.1)
    (found,) = reading.histograms(HISTOGRAM).values()
    assert (found.count, found.sum) == (1, 0.1)


def test_values_of_the_same_labels_add_up() -> None:
    """Two sessions at one address are one series."""
    reading = Reading([COUNTER, GAUGE])
    reading.add(COUNTER, 2, "a")
    reading.add(COUNTER, 3, "a")
    reading.add(COUNTER, 1, "b")
    assert reading.numbers(COUNTER) == {("a",): 5, ("b",): 1}
    assert list(reading) == [COUNTER], "a metric without a value is not shown"


def test_a_tally_has_few_values() -> None:
    """Known ones are there from the start; what is too much is counted together."""
    tally = Tally(["known"], limit=3)
    for value in ("a", "b", "c", "d", "a"):
        tally.note(value)
    assert tally == {"known": 0, "a": 2, "b": 1, "other": 2}


@pytest.mark.parametrize(
    ("name", "kind", "unit", "buckets"),
    [
        ("octavo_test_things", Kind.COUNTER, "things", ()),
        ("octavo_test_things_total", Kind.GAUGE, "things", ()),
        ("octavo_test_wait", Kind.HISTOGRAM, "seconds", (1.0,)),
        ("octavo_test_wait_seconds", Kind.HISTOGRAM, "seconds", (2.0, 1.0)),
        ("octavo_test_wait_seconds", Kind.HISTOGRAM, "seconds", ()),
        ("Octavo-things", Kind.GAUGE, "things", ()),
    ],
)
def test_definitions_keep_to_the_conventions(
    name: str, kind: Kind, unit: str, buckets: tuple[float, ...]
) -> None:
    """A name that Prometheus' users would not expect cannot be defined."""
    with pytest.raises(AssertionError):
        Metric(name, kind, unit, "What.", (), buckets)


class _Source:
    """Gives nothing until it may; notes where it was asked."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.was_cancelled = False
        self.thread = ""

    async def read(self) -> Reading:
        self.thread = threading.current_thread().name
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return Reading([])


async def test_a_thread_reads_on_the_loop() -> None:
    """The state is touched by its own thread only."""
    source, loop = _Source(), asyncio.get_running_loop()
    source.may.set()
    await asyncio.to_thread(read_from_thread, source, loop, WAIT)
    assert source.thread == threading.current_thread().name


async def test_a_thread_does_not_wait_for_ever() -> None:
    """A loop that does not come to it is given up, and has nothing left to do."""
    source, loop = _Source(), asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(read_from_thread, source, loop, 0.05)
    async with asyncio.timeout(WAIT):
        while not source.was_cancelled:
            await asyncio.sleep(0.01)


async def test_a_loop_that_is_closed_is_said_so() -> None:
    """No coroutine is left behind that nobody awaits."""
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError):
        await asyncio.to_thread(read_from_thread, _Source(), loop, WAIT)
