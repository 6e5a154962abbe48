"""Between AdminService's messages and plain values, without any I/O: both clients share it."""

from __future__ import annotations

from octavo.v1 import admin_pb2

from octavo_client._protocol import assign_field, copy_fields
from octavo_client._state import (
    Blocks,
    Counters,
    EventKind,
    Executor,
    Explanation,
    Latency,
    Pool,
    RequestEvent,
    SequenceInfo,
    Snapshot,
    StepSample,
)

_PREFIX = "KIND_"


def build_watch(interval: float, sequences: bool, blocks: bool) -> admin_pb2.WatchRequest:
    """Build the request for a snapshot every `interval` seconds."""
    request = admin_pb2.WatchRequest(include_sequences=sequences, include_blocks=blocks)
    assign_field(request, "interval_ms", round(interval * 1000))
    return request


def build_explain(request_id: str) -> admin_pb2.ExplainRequest:
    """Build the request for one request's story."""
    request = admin_pb2.ExplainRequest()
    assign_field(request, "request_id", request_id)
    return request


def parse_snapshot(snapshot: admin_pb2.Snapshot) -> Snapshot:
    """Read a scheduler's state."""
    return copy_fields(
        Snapshot,
        snapshot,
        executors=tuple(_parse_executor(state) for state in snapshot.executors),
        latency=copy_fields(Latency, snapshot.latency),
    )


def _parse_executor(state: admin_pb2.ExecutorState) -> Executor:
    return copy_fields(
        Executor,
        state,
        pool=copy_fields(Pool, state.pool),
        counters=copy_fields(Counters, state.counters),
        sequences=tuple(
            copy_fields(SequenceInfo, sequence, block_table=tuple(sequence.block_table))
            for sequence in state.sequences
        ),
        blocks=Blocks(ref_counts=tuple(state.blocks.ref_counts), kinds=state.blocks.kinds),
        steps=tuple(_parse_step(step) for step in state.steps),
    )


def _parse_step(step: admin_pb2.StepSample) -> StepSample:
    return copy_fields(
        StepSample,
        step,
        copied_blocks=tuple(step.copied_blocks),
        swapped_out_blocks=tuple(step.swapped_out_blocks),
        swapped_in_blocks=tuple(step.swapped_in_blocks),
    )


def parse_explanation(response: admin_pb2.ExplainResponse) -> Explanation:
    """Read one request's story."""
    return copy_fields(
        Explanation,
        response,
        events=tuple(
            copy_fields(RequestEvent, event, kind=_parse_kind(event.kind))
            for event in response.events
        ),
    )


def _parse_kind(number: int) -> EventKind:
    try:
        name = admin_pb2.RequestEvent.Kind.Name(number)  # type: ignore[arg-type]  # any number
        return EventKind(name.removeprefix(_PREFIX).lower())
    except ValueError:  # of a newer server
        return EventKind.UNKNOWN
