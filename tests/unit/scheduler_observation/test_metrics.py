"""The scheduler's metrics: read from real cores, right after cancels, deaths and moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from octavo.metrics import Metric, Reading

from scheduler_svc import errors
from scheduler_svc.core.snapshot import count_pool
from scheduler_svc.core.state import Counters
from scheduler_svc.observation import definitions as d
from scheduler_svc.observation import metrics as module
from scheduler_svc.observation.metrics import Metrics
from scheduler_svc.observation.step_sample import StepSample
from tests.support.core_builders import finish, make_harness, make_request
from tests.support.core_harness import CoreHarness

A, B = "a:1", "b:1"


@dataclass
class Session:
    """What metrics read of an executor's session, over a real core."""

    address: str
    harness: CoreHarness | None = None
    connected: bool = True
    is_draining: bool = False
    is_stalled: bool = False

    @property
    def core(self) -> Any:
        return None if self.harness is None else self.harness.core

    @property
    def load_tokens(self) -> int:
        return 0 if self.core is None else self.core.state.load_tokens


@dataclass
class Engine:
    """What metrics read of the engine."""

    sessions: list[Session] = field(default_factory=list)
    is_healthy: bool = True
    is_draining: bool = False
    num_requests: int = 0


def _session(address: str = A, **config: Any) -> Session:
    return Session(address, make_harness(**config))


async def _read(metrics: Metrics) -> Reading:
    return await metrics.read()


def _of(reading: Reading, metric: Metric, *labels: str) -> float:
    return reading.numbers(metric)[labels]


async def test_every_counter_of_the_core_is_shown_as_it_is() -> None:
    """After preemptions, copies, cancels and prefix hits, none is missing and none is off."""
    session = _session(num_blocks=8, num_host_blocks=8, preemption="swap")
    harness = session.harness
    harness.add(make_request("a", 6, best_of=2, max_tokens=10))
    harness.add(make_request("b", 9, max_tokens=12, arrival=1.0))
    for _ in range(6):
        harness.step()
    harness.add(make_request("gone", 5, arrival=2.0))
    harness.cancel("gone")
    finish(harness)
    harness.add(make_request("a2", make_request("a", 6).prompt_tokens, arrival=3.0))
    finish(harness)
    core = harness.core.state.counters
    assert core.num_swap_preemptions and core.num_copied_blocks and core.num_prefix_hit_tokens
    reading = await _read(Metrics(Engine([session])))
    for name, count in core.as_dict().items():
        metric, labels, worth = module._COUNTERS[name]
        assert _of(reading, metric, A, *labels) == pytest.approx(count * worth), name
    assert _of(reading, d.CANCELLED_REQUESTS, A) == 1
    assert _of(reading, d.ENDED_REQUESTS, A) == 4
    assert _of(reading, d.PREEMPTIONS, A, "recompute") == 0


def test_no_counter_of_the_core_is_forgotten() -> None:
    """A counter that is new there needs a metric here."""
    assert set(Counters().as_dict()) == set(module._COUNTERS)


async def test_gauges_are_the_state_of_the_moment() -> None:
    """The pool adds up; queue, running and preempted are who they are."""
    session = _session(num_blocks=10, max_num_seqs=2)
    harness = session.harness
    for number in range(4):
        harness.add(make_request(f"r{number}", 5, max_tokens=20, arrival=float(number)))
    for _ in range(3):
        harness.step()
    state = harness.core.state
    counts = count_pool(state)
    reading = await _read(Metrics(Engine([session], num_requests=4)))
    pool = {labels[1]: n for labels, n in reading.numbers(d.POOL_BLOCKS).items()}
    assert pool == {
        "free": counts.num_free,
        "cached": counts.num_cached,
        "referenced": counts.num_referenced,
    }
    assert sum(pool.values()) == 10
    assert _of(reading, d.RUNNING_SEQUENCES, A) == 2
    assert _of(reading, d.QUEUED_REQUESTS, A) == 2
    assert _of(reading, d.LIVE_REQUESTS, A) == _of(reading, d.STREAMS) == 4
    # Two prompts are computed, and two tokens behind each.
    assert _of(reading, d.LOAD_TOKENS, A) == 4 * 25 - 2 * (5 + 2)
    assert _of(reading, d.POOL_LIVE_SLOTS, A) == counts.live_slots > 0
    waste = {labels[1]: n for labels, n in reading.numbers(d.POOL_WASTE_SLOTS).items()}
    assert waste == {"reserved": 0, "internal": counts.internal_waste_slots, "external": 0}
    used = counts.num_referenced * state.blocks.block_size
    assert _of(reading, d.POOL_LIVE_SLOTS, A) + sum(waste.values()) == used


async def test_gauges_are_right_after_mass_cancels() -> None:
    """Nothing is kept beside the state, so nothing can be left over."""
    session = _session(num_blocks=40, max_num_seqs=8, num_host_blocks=4)
    metrics = Metrics(Engine([session]))
    harness = session.harness
    for number in range(20):
        harness.add(make_request(f"r{number}", 5, max_tokens=30, arrival=float(number)))
    for _ in range(4):
        harness.step()
    assert _of(await _read(metrics), d.QUEUED_REQUESTS, A) > 0
    for number in range(20):
        harness.cancel(f"r{number}")
    harness.drain()
    reading = await _read(metrics)
    for gauge in (
        d.LIVE_REQUESTS,
        d.QUEUED_REQUESTS,
        d.RUNNING_SEQUENCES,
        d.PREEMPTED_SEQUENCES,
        d.LOAD_TOKENS,
        d.STEPS_IN_FLIGHT,
        d.POOL_SHARED_BLOCKS,
        d.POOL_FENCED_BLOCKS,
        d.POOL_LIVE_SLOTS,
    ):
        assert reading.numbers(gauge) == {(A,): 0}, gauge.name
    assert _of(reading, d.POOL_BLOCKS, A, "referenced") == 0
    assert _of(reading, d.CANCELLED_REQUESTS, A) == 20


def _sample(**fields: int) -> StepSample:
    return StepSample(**fields)


async def test_steps_are_told_by_phase_and_size() -> None:
    """The phases of a step add up to it."""
    metrics = Metrics(Engine([_session(A), _session(B)]))
    phases = {
        "plan_ns": 1_000_000,
        "wire_ns": 2_000_000,
        "queue_ns": 4_000_000,
        "prepare_ns": 8_000_000,
        "forward_ns": 16_000_000,
        "sample_ns": 32_000_000,
    }
    metrics.note_step(A, _sample(**phases, num_decodes=3, num_chunk_tokens=13, plan_bytes=100))
    metrics.note_step(A, _sample(**phases, num_decodes=1, plan_bytes=11))
    metrics.note_step(B, _sample(forward_ns=5_000_000, num_decodes=2, plan_bytes=7))
    reading = await _read(metrics)
    assert reading.numbers(d.EXECUTED_STEPS) == {(A,): 2, (B,): 1}
    assert reading.numbers(d.PLAN_BYTES) == {(A,): 111, (B,): 7}
    of_a = [_of(reading, d.EXECUTOR_PHASE, A, phase) for phase in d.PHASES]
    assert of_a == pytest.approx([0.002, 0.004, 0.008, 0.016, 0.032, 0.064])
    (step,) = reading.histograms(d.STEP_SECONDS).values()
    assert (step.count, step.sum) == (3, pytest.approx(0.131))
    phase_sums = sum(h.sum for h in reading.histograms(d.STEP_PHASE_SECONDS).values())
    assert phase_sums == pytest.approx(step.sum)
    (tokens,) = reading.histograms(d.STEP_TOKENS).values()
    assert (tokens.count, tokens.sum) == (3, 19)


async def test_requests_are_told_by_their_ends() -> None:
    """Counts are those of the histograms; reasons beyond the known ones are few."""
    metrics = Metrics(Engine())
    metrics.note_queue_wait(0.2)
    metrics.note_first_token(0.5)
    metrics.note_later_tokens(0.02, 7)
    metrics.note_later_tokens(0.03)
    metrics.note_end("stop", 1.0)
    metrics.note_end("stop", 3.0)
    metrics.note_end("length", 2.0)
    for number in range(50):
        metrics.note_end(f"made up {number}", 1.0)
    reading = await _read(metrics)
    ends = {labels[0]: n for labels, n in reading.numbers(d.CHOICES).items()}
    assert (ends["stop"], ends["length"], ends["cancelled"], ends["error"]) == (2, 1, 0, 0)
    assert sum(ends.values()) == 53
    assert len(ends) <= module._MAX_REASONS + 1 and ends["other"] > 0
    assert reading.histograms(d.CHOICE_SECONDS)[("stop",)].sum == 4.0
    (itl,) = reading.histograms(d.INTER_TOKEN).values()
    assert (itl.count, itl.sum) == (8, pytest.approx(0.17))
    (ttft,) = reading.histograms(d.TIME_TO_FIRST_TOKEN).values()
    (wait,) = reading.histograms(d.QUEUE_WAIT).values()
    assert (ttft.count, ttft.sum, wait.count, wait.sum) == (1, 0.5, 1, 0.2)


async def test_refusals_are_told_by_error_from_the_start() -> None:
    """A rate can be taken of an error that has not happened yet."""
    metrics = Metrics(Engine())
    metrics.note_refused(errors.QueueFull.__name__)
    refused = {labels[0]: n for labels, n in (await _read(metrics)).numbers(d.REFUSED).items()}
    assert refused.pop("QueueFull") == 1
    assert set(refused.values()) == {0}
    assert {"Unavailable", "TenantLimit", "NeverFits"} <= set(refused)
    assert "StartupError" not in refused


async def test_an_executor_that_leaves_takes_its_gauges_and_leaves_its_totals() -> None:
    """And if one comes back to its address the totals go on."""
    first, other = _session(A), _session(B)
    engine = Engine([first, other])
    metrics = Metrics(engine)
    first.harness.add(make_request("r", 4, max_tokens=5))
    finish(first.harness)
    metrics.note_step(A, _sample(forward_ns=1_000_000, plan_bytes=10))
    before = await _read(metrics)
    engine.sessions = [other]
    gone = await _read(metrics)
    for metric in d.METRICS:
        if metric.kind is metric.kind.GAUGE and "executor" in metric.labels:
            assert {labels[0] for labels in gone.numbers(metric)} == {B}, metric.name
        elif metric.kind is metric.kind.COUNTER:
            assert gone.numbers(metric) == before.numbers(metric), metric.name
    again = _session(A)
    engine.sessions = [other, again]
    again.harness.add(make_request("s", 4, max_tokens=3))
    finish(again.harness)
    metrics.note_step(A, _sample(forward_ns=2_000_000, plan_bytes=20))
    back = await _read(metrics)
    assert _of(before, d.GENERATED_TOKENS, A) == 5
    assert _of(back, d.GENERATED_TOKENS, A) == 8
    assert _of(back, d.PLAN_BYTES, A) == 30
    assert _of(back, d.EXECUTOR_CONNECTED, A) == 1


async def test_one_that_comes_and_goes_between_two_scrapes_is_counted() -> None:
    """Its first step makes it known."""
    engine = Engine([_session(A)])
    metrics = Metrics(engine)
    await _read(metrics)
    short_lived = _session(B)
    engine.sessions = [*engine.sessions, short_lived]
    metrics.note_step(B, _sample(plan_bytes=1))
    short_lived.harness.add(make_request("r", 4, max_tokens=5))
    finish(short_lived.harness)
    engine.sessions = engine.sessions[:1]
    assert _of(await _read(metrics), d.GENERATED_TOKENS, B) == 5


async def test_addresses_without_end_take_no_memory_without_end() -> None:
    """The latest that left are kept, and those that are here."""
    here = _session("here:1")
    engine = Engine([here])
    metrics = Metrics(engine)
    for number in range(100):
        address = f"pod-{number}:1"
        engine.sessions = [here, _session(address)]
        metrics.note_step(address, _sample(plan_bytes=1))
    engine.sessions = [here]
    addresses = {labels[0] for labels in (await _read(metrics)).numbers(d.PLAN_BYTES)}
    kept = {f"pod-{number}:1" for number in range(100 - module._MAX_DEPARTED, 100)}
    assert addresses == {"here:1"} | kept


async def test_an_executor_that_was_never_claimed_has_no_pool() -> None:
    """Nor has one that is lost: its blocks are nobody's."""
    lost = _session(B)
    lost.connected = False
    reading = await _read(Metrics(Engine([Session(A, connected=False), lost], is_healthy=False)))
    assert reading.numbers(d.EXECUTOR_CONNECTED) == {(A,): 0, (B,): 0}
    assert reading.numbers(d.QUEUED_REQUESTS) == {(A,): 0, (B,): 0}
    assert reading.numbers(d.POOL_BLOCKS) == {}
    assert _of(reading, d.HEALTHY) == 0


async def test_two_sessions_at_one_address_are_one_series() -> None:
    """One executor may be found by a name and by its address."""
    one, two = _session(A), Session(A, connected=False)
    one.harness.add(make_request("r", 4, max_tokens=5))
    finish(one.harness)
    reading = await _read(Metrics(Engine([one, two])))
    assert reading.numbers(d.EXECUTOR_CONNECTED) == {(A,): 1}
    assert reading.numbers(d.GENERATED_TOKENS) == {(A,): 5}


async def test_every_metric_has_a_value() -> None:
    """What is documented is there from the start."""
    reading = await _read(Metrics(Engine([_session(A)])))
    assert list(reading) == list(d.METRICS)
