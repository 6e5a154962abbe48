"""What calibration makes of samples: the work of each step, and the cost model behind it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from octavo_client import StepSample
from octavo_client.bench.measure import Record
from octavo_client.bench.workload import Request

from scheduler_svc.simulator import LinearCost, SimRequest, SimulationConfig, StepWork, simulate
from scheduler_svc.simulator.work import StepSeconds
from tests.bench.step_fit import (
    Samples,
    Sizes,
    fit,
    nonnegative_least_squares,
    seconds_of,
    works_of,
)

SIZES = Sizes(
    num_blocks=400, block_size=16, num_host_blocks=0, max_num_seqs=32, max_num_batched_tokens=64
)
TRUE = LinearCost(
    "known",
    {"per_sequence": 1e-4, "per_decode_context": 2e-6, "per_prefill_context": 3e-7},
    num_blocks=400,
    token_curve=((1, 0.02), (8, 0.03), (64, 0.10)),
    max_num_seqs=32,
    max_num_batched_tokens=64,
)


class _Noting:
    """A cost model that remembers what it was asked."""

    def __init__(self) -> None:
        self.works: list[StepWork] = []

    def seconds(self, work: StepWork) -> StepSeconds:
        """Say what the true one says."""
        self.works.append(replace(work))
        return TRUE.seconds(work)


def _record(num_prompt: int, num_output: int, first_token: float, sent_at: float = 0.0) -> Record:
    record = Record(Request("r", (7,) * num_prompt, num_output), sent_at=sent_at)
    record.add(0, first_token, 1)
    return record


def _sample(work: StepWork, seconds: float = 0.0) -> StepSample:
    return StepSample(
        step_id=0,
        planned_unix_ns=0,
        plan_ns=0,
        wire_ns=0,
        queue_ns=0,
        idle_ns=0,
        prepare_ns=0,
        forward_ns=round(seconds * 1e9),
        sample_ns=0,
        num_decodes=work.num_decodes,
        num_chunk_tokens=sum(count for _, count in work.prefills or []),
        num_sampled=work.num_sampled,
        plan_bytes=0,
        copied_blocks=(),
        swapped_out_blocks=(),
        swapped_in_blocks=(),
    )


@pytest.fixture
def load() -> tuple[list[Record], list[StepWork]]:
    """Requests, and what the real core had each step do for them."""
    draw = random.Random(3)
    requests = [SimRequest(0.5 * i, draw.randint(5, 150), draw.randint(1, 30)) for i in range(30)]
    cost = _Noting()
    config = SimulationConfig(
        cost, SIZES.num_blocks, max_num_batched_tokens=64, max_num_seqs=32, policy="priority"
    )
    table = simulate(config, requests).requests
    records = [
        _record(r.num_prompt, r.num_output, table.first_token[i], r.arrival)
        for i, r in enumerate(requests)
    ]
    return records, cost.works


def test_lengths_and_counts_say_what_each_step_did(
    load: tuple[list[Record], list[StepWork]],
) -> None:
    """What is made of counts alone is what the core had the executor do."""
    records, works = load
    found = works_of(records, [_sample(work) for work in works])
    assert found is not None
    assert [LinearCost.terms(work) for work in found] == [LinearCost.terms(w) for w in works]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda steps: steps[:-1],
        lambda steps: [steps[0], *steps],
        lambda steps: [*steps[:-1], replace(steps[-1], num_sampled=steps[-1].num_sampled + 1)],
        lambda steps: [*steps, replace(steps[-1], num_decodes=0, num_chunk_tokens=5)],
    ],
    ids=["one is missing", "one is twice", "one too many drawn", "nobody's prompt"],
)
def test_samples_of_other_requests_are_told(
    load: tuple[list[Record], list[StepWork]],
    spoil: Callable[[list[StepSample]], list[StepSample]],
) -> None:
    """Samples that do not fit the lengths give nothing, rather than something wrong."""
    records, works = load
    assert works_of(records, spoil([_sample(work) for work in works])) is None


def test_first_tokens_tell_the_order_of_requests() -> None:
    """Requests that arrived in another order than they were sent are put in order."""
    records = [_record(30, 2, 2.0, sent_at=0.0), _record(10, 2, 1.0, sent_at=0.001)]
    works = [
        StepWork(0, 0, [(0, 10)], 1),
        StepWork(1, 11, [(0, 30)], 2),
        StepWork(1, 31, [], 1),
    ]
    found = works_of(records, [_sample(work) for work in works])
    assert found == works


def test_the_fit_finds_the_cost_behind_the_steps(
    load: tuple[list[Record], list[StepWork]],
) -> None:
    """Without noise the fitted model tells every step within 2%."""
    _, works = load
    samples = Samples(works=works, seconds=[TRUE.seconds(work).forward for work in works])
    found = fit(samples, SIZES, "found")
    assert found.bias == pytest.approx(1, abs=0.005)
    for work in works:
        told = found.cost.seconds(work).forward
        assert told == pytest.approx(TRUE.seconds(work).forward, rel=0.02)
    assert found.cost.max_num_batched_tokens == SIZES.max_num_batched_tokens


def test_noise_does_not_bias_the_fit(load: tuple[list[Record], list[StepWork]]) -> None:
    """Steps that are now slower and now faster give the mean, not the faster ones."""
    _, works = load
    draw = random.Random(5)
    seconds = [TRUE.seconds(work).forward * draw.choice((0.7, 1.3)) for work in works]
    found = fit(Samples(works=works, seconds=seconds), SIZES, "found")
    assert found.bias == pytest.approx(1, abs=0.02)


def test_too_few_steps_are_refused() -> None:
    """A fit to nothing is an error that says what was left out."""
    with pytest.raises(RuntimeError, match="only 0 steps: left out \\['short'\\]"):
        fit(Samples(left_out=["short"]), SIZES, "x")


def test_a_short_pause_is_part_of_a_step() -> None:
    """Handing over counts; a pause in which nothing was asked for does not."""
    step = _sample(StepWork(1, 5, [], 1), 0.030)
    assert seconds_of(replace(step, idle_ns=2_000_000)) == pytest.approx(0.032)
    assert seconds_of(replace(step, idle_ns=2_000_000_000)) == pytest.approx(0.030)


@pytest.mark.parametrize("seed", range(20))
def test_nonnegative_least_squares(seed: int) -> None:
    """At the solution nothing is below 0, and no step that is allowed goes down (KKT)."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(40, 6)), rng.normal(size=40)
    x = nonnegative_least_squares(a, b)
    slope = a.T @ (b - a @ x)
    assert (x >= 0).all()
    assert (slope <= 1e-6).all()
    assert np.abs(slope[x > 0]).max(initial=0.0) < 1e-6
