"""The comparison of one process and two: both do the same work, and it is summed up right."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import fields, replace

import pytest

from executor_svc.device_thread import DeviceThread
from executor_svc.plan import Outcome, Plan, StepError, StepErrorKind, Timings
from executor_svc.server import ExecutorServer
from executor_svc.wire import plan_from_proto
from scheduler_svc.core.request import SamplingParams
from scheduler_svc.core.state import Counters
from scheduler_svc.core.step import StepTimings
from scheduler_svc.translation import plan_to_proto
from tests.bench import in_process
from tests.bench.in_process import ONE_PROCESS, SPLIT, OneProcess, Round, Split
from tests.integration.executor_rig import config
from tests.integration.test_engine_over_wire import FakeEngine, expected
from tests.support.core_harness import CoreHarness
from tests.support.core_random import random_config, random_request

PROMPTS = [[5 + i, 7, 11 * (i + 1) % 90] * (1 + i % 5) for i in range(12)]
WORKLOAD = [in_process.Wanted(f"r{i}", tuple(prompt), 6 + i) for i, prompt in enumerate(PROMPTS)]


class Alive:
    """Stands for an executor's process that goes on."""

    has_ended = False


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = ExecutorServer(config(), FakeEngine)
    await server.start()
    await server.wait_ready()
    yield server.address
    await server.stop()


def test_a_plan_handed_over_is_the_plan_that_the_wire_carries() -> None:
    """Field for field, for plans of all kinds: no arm gets work that the other does not."""
    seen: set[str] = set()
    for seed in range(40):
        rng = random.Random(seed)
        harness = CoreHarness(random_config(rng))
        prefixes = [[rng.randrange(50) for _ in range(length)] for length in (1, 6, 12)]
        for number in range(12):
            request = random_request(rng, f"r{number}", 0.0, prefixes)
            sampling = SamplingParams(
                temperature=0.5,
                top_k=number,
                logit_bias={number: 1.5},
                allowed_token_ids=(1, number + 2),
            )
            limits = {"min_tokens": number % 3, "sampling": sampling}
            harness.add(replace(request, deadline=None, **({} if request.beam else limits)))
        while harness.core.has_requests:
            plan = harness.plan()
            if plan is None:
                harness.apply()
                continue
            handed = in_process.as_executor_plan(plan, 3)
            assert handed == plan_from_proto(plan_to_proto(plan, 3))
            seen |= {f.name for f in fields(Plan) if getattr(handed, f.name) not in ((), [], "")}
    assert {f.name for f in fields(Plan)} - seen == set(), "every kind was there"


def test_a_result_handed_over_keeps_tokens_and_timings() -> None:
    """By name, not by place: the two forms order them differently."""
    timings = Timings(1, 2, prepare_ns=3, forward_ns=4, move_ns=5, sample_ns=6)
    result = in_process.as_core_result(Outcome(1, 7, tokens=(4, 5), timings=timings))
    assert (result.step_id, result.tokens) == (7, [4, 5])
    assert result.timings == StepTimings(1, 2, 3, 4, sample_ns=6, move_ns=5)
    with pytest.raises(RuntimeError, match="no room"):
        in_process.as_core_result(
            Outcome(1, 7, error=StepError(StepErrorKind.OUT_OF_MEMORY, "no room"))
        )


async def test_both_arms_do_the_same_work(address: str) -> None:
    """The model's tokens in as many steps, in every round."""
    split = Split(SPLIT, address, Alive(), ["--max-num-seqs", "5"])  # type: ignore[arg-type]
    first, core_config = await split.run(WORKLOAD)
    assert core_config.max_num_seqs == 5
    device = DeviceThread(FakeEngine)
    device.start()
    one_process = OneProcess(device, core_config)
    rounds = [first, one_process.run(WORKLOAD), (await split.run(WORKLOAD))[0]]
    device.stop()
    tokens = [
        token
        for wanted in WORKLOAD
        for token in expected(list(wanted.prompt), wanted.num_output_tokens)
    ]
    wanted = Round.of(ONE_PROCESS, 1.0, [tokens], Counters(executor_busy_ns=1))
    assert {r.tokens_crc32 for r in rounds} == {wanted.tokens_crc32}
    assert {r.num_output_tokens for r in rounds} == {len(tokens)}
    assert len({r.num_steps for r in rounds}) == 1
    assert all(r.seconds > 0 for r in rounds)


def turns(*seconds: float, arm: str = ONE_PROCESS, **changes: int) -> list[Round]:
    """Rounds of 120 tokens."""
    work = {"num_output_tokens": 120, "num_steps": 9, "tokens_crc32": 5, **changes}
    return [Round(arm, each, idle_share=each / 100, **work) for each in seconds]


def test_the_ratio_is_that_of_medians() -> None:
    """One odd round changes nothing; each round's own ratio is there to see it."""
    summary = in_process.summarize([*turns(1.0, 6.0, 1.0), *turns(2.0, 1.25, 1.25, arm=SPLIT)])
    assert summary["tokens_per_second"] == {ONE_PROCESS: 120.0, SPLIT: 96.0}
    assert summary["ratio"] == {ONE_PROCESS: 1.0, SPLIT: 0.8}
    assert summary["ratio_by_round"][SPLIT] == pytest.approx([0.5, 4.8, 0.8])
    assert summary["idle_share"] == {ONE_PROCESS: 0.01, SPLIT: 0.0125}
    row = in_process.table(summary)[-1]
    assert row.startswith(SPLIT) and "20.00%" in row and "1.25%" in row


@pytest.mark.parametrize("change", ["num_steps", "tokens_crc32", "num_output_tokens"])
def test_rounds_of_different_work_are_not_compared(change: str) -> None:
    """More steps or other tokens: then the times say nothing."""
    with pytest.raises(ValueError, match="same work"):
        in_process.summarize([*turns(1.0), *turns(1.0, arm=SPLIT, **{change: 1})])
