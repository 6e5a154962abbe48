"""The wire on one side, the core's plain values on the other. Nothing else knows both."""

from __future__ import annotations

from octavo.v1 import executor_pb2 as pb
from octavo.v1 import types_pb2

from scheduler_svc.core.request import PositionLogprobs, SamplingParams, TokenLogprob
from scheduler_svc.core.step import (
    RowLogprobs,
    RowStart,
    StepError,
    StepErrorKind,
    StepPlan,
    StepResult,
    StepTimings,
)

_ERROR_KINDS = {
    pb.StepError.KIND_OUT_OF_MEMORY: StepErrorKind.OUT_OF_MEMORY,
    pb.StepError.KIND_INVALID_PLAN: StepErrorKind.INVALID_PLAN,
    pb.StepError.KIND_KV_CHECK: StepErrorKind.KV_CHECK,
}


def plan_to_proto(plan: StepPlan, epoch: int) -> pb.StepPlan:
    """Return the message of a sealed plan; a steady step carries three numbers."""
    message = pb.StepPlan(epoch=epoch, step_id=plan.step_id, previous_step_id=plan.step_id - 1)
    if plan.finish_rows:
        message.finish_rows.extend(plan.finish_rows)
    for start in plan.starts:
        message.starts.append(_start_to_proto(start))
    for parent, child, token in plan.children:
        message.child_parents.append(parent)
        message.child_rows.append(child)
        message.child_tokens.append(token)
    for row, logical, block in plan.replacements:
        message.table_updates.add(row=row, first_logical_block=logical, blocks=[block])
    for row, table in plan.tables:
        message.table_updates.add(row=row, blocks=table, truncate=True)
    if plan.append_rows:
        message.append_rows.extend(plan.append_rows)
        message.append_blocks.extend(plan.append_blocks)
    _moves_to_proto(plan, message)
    if plan.decode_leave_rows:
        message.decode_leave_rows.extend(plan.decode_leave_rows)
    if plan.decode_enter_rows:
        message.decode_enter_rows.extend(plan.decode_enter_rows)
    if plan.chunk_rows:
        message.chunk_rows.extend(plan.chunk_rows)
        message.chunk_counts.extend(plan.chunk_counts)
    for parent, child, sample_index in plan.forks:
        message.fork_parents.append(parent)
        message.fork_rows.append(child)
        message.fork_sample_indices.append(sample_index)
    return message


def _moves_to_proto(plan: StepPlan, message: pb.StepPlan) -> None:
    if plan.swap_out_device_blocks:
        message.swap_out_device_blocks.extend(plan.swap_out_device_blocks)
        message.swap_out_host_blocks.extend(plan.swap_out_host_blocks)
    if plan.copy_sources:
        message.copy_sources.extend(plan.copy_sources)
        message.copy_destinations.extend(plan.copy_destinations)
    if plan.swap_in_host_blocks:
        message.swap_in_host_blocks.extend(plan.swap_in_host_blocks)
        message.swap_in_device_blocks.extend(plan.swap_in_device_blocks)


def _start_to_proto(start: RowStart) -> pb.RowStart:
    seq = start.sequence
    request = seq.group.request
    message = pb.RowStart(
        row=start.row,
        tokens=start.tokens,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_computed_tokens=start.num_computed_tokens,
        blocks=start.blocks,
        sampling=sampling_to_proto(request.sampling),
        sample_index=seq.sample_index,
        num_beam_candidates=seq.group.beam.num_candidates if seq.group.beam else 0,
        min_tokens=request.min_tokens,
        stop_token_ids=sorted(request.stop_token_ids) if request.min_tokens else (),
        lineage=seq.group.lineage,
    )
    if request.num_logprobs is not None:
        message.num_logprobs = request.num_logprobs
    if request.num_prompt_logprobs is not None:
        message.num_prompt_logprobs = request.num_prompt_logprobs
    return message


def sampling_to_proto(sampling: SamplingParams) -> types_pb2.SamplingParams:
    """Return the message with every scalar set."""
    return types_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
    )


def result_from_proto(message: pb.StepResult) -> StepResult:
    """Return the plain value of a result."""
    result = StepResult(message.step_id, list(message.tokens))
    if message.HasField("timings"):
        t = message.timings
        result.timings = StepTimings(
            t.queue_ns, t.idle_ns, t.prepare_ns, t.forward_ns, t.sample_ns, t.move_ns
        )
    if message.logprobs:
        result.logprobs = {entry.row: _row_logprobs(entry) for entry in message.logprobs}
    if message.row_errors:
        result.row_errors = {entry.row: entry.message for entry in message.row_errors}
    if message.HasField("error"):
        kind = _ERROR_KINDS.get(message.error.kind, StepErrorKind.INTERNAL)
        result.error = StepError(kind, message.error.message)
    return result


def _row_logprobs(message: pb.RowLogprobs) -> RowLogprobs:
    sampled = _position(message.sampled) if message.HasField("sampled") else None
    return RowLogprobs(sampled, tuple(_position(entry) for entry in message.prompt))


def _position(message: types_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        TokenLogprob(message.chosen.token_id, message.chosen.logprob),
        tuple(TokenLogprob(entry.token_id, entry.logprob) for entry in message.top),
    )
