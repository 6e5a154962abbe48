"""Plans as deltas: what goes over the wire, and how little."""

from __future__ import annotations

import pytest
from octavo.v1 import executor_pb2 as pb

from scheduler_svc.core.request import BeamParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepErrorKind, StepPlan, StepResult
from scheduler_svc.translation import plan_to_proto, result_from_proto
from tests.support.core_builders import finish, make_config, make_harness, make_request


def _steady_sizes(num_decodes: int, context: int, num_steps: int = 16) -> list[int]:
    """Bytes of the plans of steps in which everyone decodes."""
    core = Scheduler(
        make_config(
            num_blocks=num_decodes * (context // 16 + 4),
            block_size=16,
            max_num_batched_tokens=num_decodes * (context + 16),
            max_num_seqs=num_decodes,
        )
    )
    for index in range(num_decodes):
        prompt = [index, *[1] * (context + index % 16 - 1)]
        core.add(make_request(f"r{index}", prompt, max_tokens=40))
    sizes = []
    for _ in range(num_steps + 2):
        plan = core.plan(0.0)
        sizes.append(len(plan_to_proto(plan, epoch=7).SerializeToString()))
        core.apply(StepResult(plan.step_id, [1] * len(core.state.in_flight[0].sampled)))
    return sizes[2:]


def test_a_steady_step_of_256_decodes_takes_less_than_300_bytes() -> None:
    """On the wire, with the blocks that one in sixteen of them needs."""
    sizes = _steady_sizes(256, context=100)
    assert max(sizes) < 300
    assert min(sizes) > 0


def test_the_size_of_a_plan_does_not_grow_with_the_context() -> None:
    """Only the width of a block's number may show."""
    short, long = _steady_sizes(16, context=50), _steady_sizes(16, context=3000)
    assert max(long) <= max(short) + 16


def test_a_step_that_only_decodes_carries_three_numbers() -> None:
    """Epoch, step and the step before."""
    harness = make_harness(block_size=16)
    harness.add(make_request("r", 4))
    harness.step()
    harness.step()
    message = plan_to_proto(harness.step(), epoch=3)
    assert message == pb.StepPlan(epoch=3, step_id=3, previous_step_id=2)
    finish(harness)


def test_rows_that_leave_are_no_work_of_their_own() -> None:
    """They go with the next plan that has any."""
    plan = StepPlan(step_id=1, finish_rows=[1], decode_leave_rows=[2])
    assert not plan.has_work
    plan.chunk_rows, plan.chunk_counts = [3], [5]
    assert plan.has_work
    assert plan.num_tokens == 5


def test_every_part_of_a_plan_arrives() -> None:
    """Field for field, in the parallel lists of the message."""
    plan = StepPlan(
        step_id=9,
        finish_rows=[1],
        children=[(2, 3, 77), (2, 2, 78)],
        replacements=[(4, 1, 40)],
        tables=[(5, [50, 51])],
        append_rows=[6],
        append_blocks=[60],
        swap_out_device_blocks=[10],
        swap_out_host_blocks=[11],
        copy_sources=[12],
        copy_destinations=[13],
        swap_in_host_blocks=[14],
        swap_in_device_blocks=[15],
        decode_leave_rows=[7],
        decode_enter_rows=[8],
        chunk_rows=[9],
        chunk_counts=[10],
        forks=[(9, 16, 1)],
    )
    expected = pb.StepPlan(
        epoch=2,
        step_id=9,
        previous_step_id=8,
        finish_rows=[1],
        child_parents=[2, 2],
        child_rows=[3, 2],
        child_tokens=[77, 78],
        table_updates=[
            pb.TableUpdate(row=4, first_logical_block=1, blocks=[40]),
            pb.TableUpdate(row=5, blocks=[50, 51], truncate=True),
        ],
        append_rows=[6],
        append_blocks=[60],
        swap_out_device_blocks=[10],
        swap_out_host_blocks=[11],
        copy_sources=[12],
        copy_destinations=[13],
        swap_in_host_blocks=[14],
        swap_in_device_blocks=[15],
        decode_leave_rows=[7],
        decode_enter_rows=[8],
        chunk_rows=[9],
        chunk_counts=[10],
        fork_parents=[9],
        fork_rows=[16],
        fork_sample_indices=[1],
    )
    assert plan_to_proto(plan, epoch=2) == expected


def test_a_start_carries_what_the_executor_needs_to_sample() -> None:
    """Tokens, blocks, sampling, and for a beam how many candidates to report."""
    harness = make_harness()
    harness.add(make_request("r", [5, 6, 7, 8, 9], best_of=2, beam=BeamParams(2)))
    harness.add(make_request("s", 3, num_logprobs=2, tenant="t", arrival=1.0))
    starts = plan_to_proto(harness.plan(), epoch=1).starts
    assert list(starts[0].tokens) == [5, 6, 7, 8, 9]
    assert (starts[0].num_prompt_tokens, len(starts[0].blocks)) == (5, 2)
    assert starts[0].num_beam_candidates == 4
    assert not starts[0].HasField("num_logprobs")
    assert (starts[1].num_logprobs, starts[1].sampling.temperature) == (2, 1.0)
    assert starts[1].lineage != starts[0].lineage
    harness.apply()
    finish(harness)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pb.StepError.KIND_OUT_OF_MEMORY, StepErrorKind.OUT_OF_MEMORY),
        (pb.StepError.KIND_KV_CHECK, StepErrorKind.KV_CHECK),
        (pb.StepError.KIND_UNSPECIFIED, StepErrorKind.INTERNAL),
    ],
)
def test_a_failed_step_says_why(kind, expected) -> None:
    """An unknown kind is an internal error."""
    result = result_from_proto(pb.StepResult(step_id=4, error=pb.StepError(kind=kind, message="m")))
    assert (result.step_id, result.error.kind, result.error.message) == (4, expected, "m")


def test_a_result_arrives_with_tokens_timings_and_logprobs() -> None:
    """What is not set stays empty."""
    message = pb.StepResult(step_id=5, tokens=[1, 2])
    assert result_from_proto(message) == StepResult(5, [1, 2])
    message.timings.forward_ns = 30
    message.logprobs.add(row=3).sampled.chosen.token_id = 8
    message.row_errors.add(row=4, message="bad")
    result = result_from_proto(message)
    assert result.timings.forward_ns == 30
    assert result.logprobs[3].sampled.chosen.token_id == 8
    assert result.logprobs[3].prompt == ()
    assert result.row_errors == {4: "bad"}
