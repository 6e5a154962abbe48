"""Between protobuf and plain values: plans in, results out.

Only what protobuf itself can get wrong is checked here (a scalar left unset); what a
plan means for the rows is checked by the row table.
"""

from __future__ import annotations

from octavo.protocol import PLAN_PROTOCOL
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import types_pb2

from executor_svc.errors import InvalidPlan
from executor_svc.plan import (
    Description,
    Outcome,
    Plan,
    Position,
    RowDigest,
    RowLogprobs,
    RowStart,
    Sampling,
    StepError,
    StepErrorKind,
    TableUpdate,
)

_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)

_ERROR_KINDS = {
    StepErrorKind.OUT_OF_MEMORY: pb.StepError.KIND_OUT_OF_MEMORY,
    StepErrorKind.INVALID_PLAN: pb.StepError.KIND_INVALID_PLAN,
    StepErrorKind.KV_CHECK: pb.StepError.KIND_KV_CHECK,
    StepErrorKind.INTERNAL: pb.StepError.KIND_INTERNAL,
}


def read_plan(message: pb.StepPlan) -> Plan:
    """Read a plan; one that is incomplete fails in its turn, and fails the steps after it."""
    try:
        return plan_from_proto(message)
    except InvalidPlan as error:
        return Plan(
            epoch=message.epoch,
            step_id=message.step_id,
            broken=StepError(StepErrorKind.INVALID_PLAN, str(error)),
            encode=message.SerializeToString,
        )


def plan_from_proto(message: pb.StepPlan) -> Plan:
    """Read a plan.

    Raises:
        InvalidPlan: if a row's sampling is incomplete.
    """
    return Plan(
        epoch=message.epoch,
        step_id=message.step_id,
        finish_rows=list(message.finish_rows),
        starts=[_start_from_proto(start) for start in message.starts],
        child_parents=list(message.child_parents),
        child_rows=list(message.child_rows),
        child_tokens=list(message.child_tokens),
        table_updates=[
            TableUpdate(
                update.row, update.first_logical_block, list(update.blocks), update.truncate
            )
            for update in message.table_updates
        ],
        append_rows=list(message.append_rows),
        append_blocks=list(message.append_blocks),
        swap_out_device_blocks=list(message.swap_out_device_blocks),
        swap_out_host_blocks=list(message.swap_out_host_blocks),
        copy_sources=list(message.copy_sources),
        copy_destinations=list(message.copy_destinations),
        swap_in_host_blocks=list(message.swap_in_host_blocks),
        swap_in_device_blocks=list(message.swap_in_device_blocks),
        decode_leave_rows=list(message.decode_leave_rows),
        decode_enter_rows=list(message.decode_enter_rows),
        chunk_rows=list(message.chunk_rows),
        chunk_counts=list(message.chunk_counts),
        fork_parents=list(message.fork_parents),
        fork_rows=list(message.fork_rows),
        fork_sample_indices=list(message.fork_sample_indices),
        encode=message.SerializeToString,
    )


def result_to_proto(outcome: Outcome) -> pb.StepResult:
    """Write a step's result."""
    timings = outcome.timings
    result = pb.StepResult(
        epoch=outcome.epoch,
        step_id=outcome.step_id,
        tokens=outcome.tokens,
        logprobs=[_logprobs_to_proto(logprobs) for logprobs in outcome.logprobs],
        row_errors=[pb.RowError(row=row, message=text) for row, text in outcome.row_errors],
        timings=pb.StepTimings(
            queue_ns=timings.queue_ns,
            idle_ns=timings.idle_ns,
            prepare_ns=timings.prepare_ns,
            forward_ns=timings.forward_ns,
            sample_ns=timings.sample_ns,
            move_ns=timings.move_ns,
        ),
    )
    if outcome.error is not None:
        result.error.kind = _ERROR_KINDS[outcome.error.kind]
        result.error.message = outcome.error.message
    return result


def description_to_proto(
    description: Description,
    *,
    instance: str,
    epoch: int,
    owner: str,
    schedulers: list[str],
    draining: bool,
) -> pb.DescribeResponse:
    """Write what this executor is, who owns it and who would like to."""
    return pb.DescribeResponse(
        model=description.model,
        fingerprint=description.fingerprint,
        block_size=description.block_size,
        num_device_blocks=description.num_device_blocks,
        num_host_blocks=description.num_host_blocks,
        dtype=description.dtype,
        max_model_len=description.max_model_len,
        max_num_batched_tokens=description.max_num_batched_tokens,
        max_num_rows=description.max_num_rows,
        tensor_parallel_size=description.tensor_parallel_size,
        vocab_size=description.vocab_size,
        block_bytes=description.block_bytes,
        device=description.device,
        attention=description.attention,
        octavo_version=description.octavo_version,
        plan_protocol=PLAN_PROTOCOL,
        instance=instance,
        epoch=epoch,
        owner=owner,
        schedulers=schedulers,
        draining=draining,
    )


def audit_to_proto(digests: list[RowDigest], *, epoch: int, step_id: int) -> pb.AuditResponse:
    """Write the digest of all rows."""
    return pb.AuditResponse(
        epoch=epoch,
        step_id=step_id,
        rows=[
            pb.RowDigest(
                row=digest.row,
                num_tokens=digest.num_tokens,
                num_computed_tokens=digest.num_computed_tokens,
                table_crc32=digest.table_crc32,
            )
            for digest in digests
        ],
    )


def _start_from_proto(start: pb.RowStart) -> RowStart:
    sampling = start.sampling
    for name in _SCALARS:
        if not sampling.HasField(name):  # type: ignore[arg-type] # a literal of these names
            raise InvalidPlan(f"starts: row {start.row} has sampling.{name} unset")
    return RowStart(
        row=start.row,
        tokens=list(start.tokens),
        num_prompt_tokens=start.num_prompt_tokens,
        num_computed_tokens=start.num_computed_tokens,
        blocks=list(start.blocks),
        sampling=Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            logit_bias=dict(sampling.logit_bias),
            allowed_token_ids=list(sampling.allowed_token_ids),
        ),
        sample_index=start.sample_index,
        num_logprobs=start.num_logprobs if start.HasField("num_logprobs") else None,
        num_prompt_logprobs=(
            start.num_prompt_logprobs if start.HasField("num_prompt_logprobs") else None
        ),
        num_beam_candidates=start.num_beam_candidates,
        min_tokens=start.min_tokens,
        stop_token_ids=list(start.stop_token_ids),
        lineage=start.lineage,
    )


def _logprobs_to_proto(logprobs: RowLogprobs) -> pb.RowLogprobs:
    message = pb.RowLogprobs(
        row=logprobs.row, prompt=[_position_to_proto(position) for position in logprobs.prompt]
    )
    if logprobs.sampled is not None:
        message.sampled.CopyFrom(_position_to_proto(logprobs.sampled))
    return message


def _position_to_proto(position: Position) -> types_pb2.PositionLogprobs:
    return types_pb2.PositionLogprobs(
        chosen=types_pb2.TokenLogprob(
            token_id=position.chosen_token, logprob=position.chosen_logprob
        ),
        top=[
            types_pb2.TokenLogprob(token_id=token, logprob=logprob)
            for token, logprob in zip(position.top_tokens, position.top_logprobs, strict=True)
        ],
    )
