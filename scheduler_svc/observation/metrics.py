"""The scheduler's metrics, read from the engine when somebody asks.

    cores: counters, pool, queues ──┐
    sessions: connected, draining ──┼─> read() ──> /metrics, OTLP
    histograms, of what is over  ───┘
          ^
          └── note_*: the engine, as things happen

Gauges and the totals of cores are kept nowhere else, so they are right after any number of
cancels, deaths and moves. The gauges of an executor go with it. Its totals stay, under its
address, and go on if one comes back there; of addresses that are gone the latest 32 are kept.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import TYPE_CHECKING

from octavo.metrics import Histogram, Metric, Reading, Tally

from scheduler_svc import errors
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.snapshot import count_pool
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.observation import definitions as d
from scheduler_svc.observation.step_sample import StepSample

if TYPE_CHECKING:
    from scheduler_svc.engine import Engine
    from scheduler_svc.executor_session import ExecutorSession

_MAX_DEPARTED = 32
_MAX_REASONS = 8
_NS = 1e-9

# The core's counters: their metric, its further labels, and what one of them is worth.
_COUNTERS: dict[str, tuple[Metric, tuple[str, ...], float]] = {
    "num_steps": (d.STEPS, (), 1),
    "num_prompt_tokens": (d.PROMPT_TOKENS, (), 1),
    "num_generated_tokens": (d.GENERATED_TOKENS, (), 1),
    "num_recompute_preemptions": (d.PREEMPTIONS, ("recompute",), 1),
    "num_swap_preemptions": (d.PREEMPTIONS, ("swap",), 1),
    "num_copied_blocks": (d.COPIED_BLOCKS, (), 1),
    "num_prefix_hit_tokens": (d.PREFIX_HIT_TOKENS, (), 1),
    "num_prefix_query_tokens": (d.PREFIX_QUERY_TOKENS, (), 1),
    "num_finished": (d.ENDED_REQUESTS, (), 1),
    "num_cancelled": (d.CANCELLED_REQUESTS, (), 1),
    "num_discarded_tokens": (d.DISCARDED_TOKENS, (), 1),
    "live_slot_steps": (d.LIVE_SLOT_STEPS, (), 1),
    "allocated_slot_steps": (d.ALLOCATED_SLOT_STEPS, (), 1),
    "num_resyncs": (d.RESYNCS, (), 1),
    "saved_block_steps": (d.SAVED_BLOCK_STEPS, (), 1),
    "executor_idle_ns": (d.EXECUTOR_IDLE, (), _NS),
    "executor_busy_ns": (d.EXECUTOR_BUSY, (), _NS),
    "num_adopted": (d.ADOPTED_REQUESTS, (), 1),
}


class _Totals:
    """What executors did at one address: sessions that are over, and the steps of all."""

    __slots__ = ("ended", "num_steps", "phases_ns", "plan_bytes")

    def __init__(self) -> None:
        self.ended: dict[str, int] = {}
        self.num_steps = 0
        self.phases_ns = [0] * len(d.PHASES)
        self.plan_bytes = 0

    def add_ended(self, counters: dict[str, int]) -> None:
        """Keep the counters of a core that is no more."""
        for name, count in counters.items():
            self.ended[name] = self.ended.get(name, 0) + count


class Metrics:
    """The metrics of one scheduler; every method is called on its event loop."""

    def __init__(self, engine: Engine) -> None:
        """Read from this engine."""
        self._engine = engine
        self._version = importlib.metadata.version("octavo")
        self._sessions: list[ExecutorSession] = []
        self._totals: dict[str, _Totals] = {}
        self._queue_wait = Histogram(d.QUEUE_WAIT.buckets)
        self._first_token = Histogram(d.TIME_TO_FIRST_TOKEN.buckets)
        self._inter_token = Histogram(d.INTER_TOKEN.buckets)
        self._ends = {reason.value: Histogram(d.CHOICE_SECONDS.buckets) for reason in FinishReason}
        self._refused = Tally(_error_names())
        self._steps = Histogram(d.STEP_SECONDS.buckets)
        self._step_tokens = Histogram(d.STEP_TOKENS.buckets)
        self._phases = [Histogram(d.STEP_PHASE_SECONDS.buckets) for _ in d.PHASES]

    # -- what the engine tells -----------------------------------------------------------

    def note_step(self, executor: str, sample: StepSample) -> None:
        """A step was executed."""
        totals = self._totals.get(executor)
        if totals is None:
            totals = self._begin(executor)
        totals.num_steps += 1
        totals.plan_bytes += sample.plan_bytes
        phases = (
            sample.plan_ns,
            sample.wire_ns,
            sample.queue_ns,
            sample.prepare_ns,
            sample.forward_ns,
            sample.sample_ns,
        )
        for index, ns in enumerate(phases):
            totals.phases_ns[index] += ns
            self._phases[index].observe(ns * _NS)
        self._steps.observe(sum(phases) * _NS)
        self._step_tokens.observe(sample.num_decodes + sample.num_chunk_tokens)

    def note_queue_wait(self, seconds: float) -> None:
        """A request was admitted for the first time."""
        self._queue_wait.observe(seconds)

    def note_first_token(self, seconds: float) -> None:
        """A request has its first token."""
        self._first_token.observe(seconds)

    def note_later_tokens(self, seconds: float, count: int = 1) -> None:
        """So many sequences have a token again, after this time."""
        self._inter_token.observe(seconds, count)

    def note_end(self, reason: str, seconds: float) -> None:
        """A choice ended, so long after its request came."""
        histogram = self._ends.get(reason)
        if histogram is None:
            name = reason if len(self._ends) < _MAX_REASONS else "other"
            histogram = self._ends.setdefault(name, Histogram(d.CHOICE_SECONDS.buckets))
        histogram.observe(seconds)

    def note_refused(self, error_name: str) -> None:
        """A request was refused or broken off; named by the class of its error."""
        self._refused.note(error_name)

    # -- what is read ----------------------------------------------------------------------

    async def read(self) -> Reading:
        """Read everything; between two executors steps may go on."""
        self._notice_departures()
        reading = Reading(d.METRICS)
        self._read_process(reading)
        self._read_totals(reading)
        for session in tuple(self._sessions):
            self._read_session(reading, session)
            await asyncio.sleep(0)
        return reading

    def _read_process(self, reading: Reading) -> None:
        engine = self._engine
        reading.add(d.BUILD_INFO, 1, self._version)
        reading.add(d.HEALTHY, int(engine.is_healthy))
        reading.add(d.DRAINING, int(engine.is_draining))
        reading.add(d.STREAMS, engine.num_requests)
        reading.add_tally(d.REFUSED, self._refused)
        for reason, histogram in self._ends.items():
            reading.add(d.CHOICES, histogram.count, reason)
            reading.put(d.CHOICE_SECONDS, histogram, reason)
        reading.put(d.QUEUE_WAIT, self._queue_wait)
        reading.put(d.TIME_TO_FIRST_TOKEN, self._first_token)
        reading.put(d.INTER_TOKEN, self._inter_token)
        reading.put(d.STEP_SECONDS, self._steps)
        reading.put(d.STEP_TOKENS, self._step_tokens)
        for phase, histogram in zip(d.PHASES, self._phases, strict=True):
            reading.put(d.STEP_PHASE_SECONDS, histogram, phase)

    def _read_totals(self, reading: Reading) -> None:
        for address, totals in self._totals.items():
            reading.add(d.EXECUTED_STEPS, totals.num_steps, address)
            reading.add(d.PLAN_BYTES, totals.plan_bytes, address)
            for phase, ns in zip(d.PHASES, totals.phases_ns, strict=True):
                reading.add(d.EXECUTOR_PHASE, ns * _NS, address, phase)
            _read_counters(reading, address, totals.ended)

    def _read_session(self, reading: Reading, session: ExecutorSession) -> None:
        address, core = session.address, session.core
        reading.add(d.EXECUTOR_CONNECTED, int(session.connected), address)
        reading.add(d.EXECUTOR_DRAINING, int(session.is_draining), address)
        reading.add(d.EXECUTOR_STALLED, int(session.is_stalled), address)
        reading.add(d.LOAD_TOKENS, session.load_tokens, address)
        state = None if core is None else core.state
        reading.add(d.LIVE_REQUESTS, len(state.groups) if state else 0, address)
        reading.add(d.QUEUED_REQUESTS, len(state.waiting) if state else 0, address)
        running = sum(len(group.live) for group in state.running) if state else 0
        reading.add(d.RUNNING_SEQUENCES, running, address)
        preempted = sum(len(group.live) for group in state.preempted) if state else 0
        reading.add(d.PREEMPTED_SEQUENCES, preempted, address)
        reading.add(d.STEPS_IN_FLIGHT, len(state.in_flight) if state else 0, address)
        if state is not None:
            _read_counters(reading, address, state.counters.as_dict())
            if session.connected:
                _read_pool(reading, address, state)

    # -- executors that come and go ----------------------------------------------------------

    def _begin(self, address: str) -> _Totals:
        """Begin to count at an address; seldom, so it is a time to see who has gone."""
        self._notice_departures()
        return self._totals.setdefault(address, _Totals())

    def _notice_departures(self) -> None:
        """Keep the totals of sessions that are no more, and forget the oldest of them."""
        present = self._engine.sessions
        here = set(map(id, present))
        for session in self._sessions:
            if id(session) not in here:
                # Moved to the end: the latest to go is the last to be forgotten.
                totals = self._totals.pop(session.address, None) or _Totals()
                self._totals[session.address] = totals
                if session.core is not None:
                    totals.add_ended(session.core.state.counters.as_dict())
        self._sessions = present
        for session in present:
            self._totals.setdefault(session.address, _Totals())
        addresses = {session.address for session in present}
        departed = [address for address in self._totals if address not in addresses]
        for address in departed[: max(0, len(departed) - _MAX_DEPARTED)]:
            del self._totals[address]


def _error_names() -> list[str]:
    """Errors that a caller may get."""
    kinds = [*errors.OctavoError.__subclasses__()]
    return [kind.__name__ for kind in kinds if kind is not errors.StartupError]


def _read_counters(reading: Reading, address: str, counters: dict[str, int]) -> None:
    for name, count in counters.items():
        metric, labels, worth = _COUNTERS[name]
        reading.add(metric, count * worth, address, *labels)


def _read_pool(reading: Reading, address: str, state: SchedulerState) -> None:
    counts = count_pool(state)
    reading.add(d.POOL_BLOCKS, counts.num_free, address, "free")
    reading.add(d.POOL_BLOCKS, counts.num_cached, address, "cached")
    reading.add(d.POOL_BLOCKS, counts.num_referenced, address, "referenced")
    reading.add(d.POOL_SHARED_BLOCKS, counts.num_shared, address)
    reading.add(d.POOL_FENCED_BLOCKS, counts.num_fenced, address)
    host_used = counts.num_host_total - counts.num_host_free
    reading.add(d.HOST_POOL_BLOCKS, counts.num_host_free, address, "free")
    reading.add(d.HOST_POOL_BLOCKS, host_used, address, "used")
    reading.add(d.POOL_LIVE_SLOTS, counts.live_slots, address)
    reading.add(d.POOL_WASTE_SLOTS, 0, address, "reserved")
    reading.add(d.POOL_WASTE_SLOTS, counts.internal_waste_slots, address, "internal")
    reading.add(d.POOL_WASTE_SLOTS, 0, address, "external")
