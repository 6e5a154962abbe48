"""AdminService: the pool, the queue and every sequence, as they are between two steps."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from octavo.v1 import admin_pb2

from scheduler_svc.api import status
from scheduler_svc.api.codec import Malformed, register
from scheduler_svc.core import snapshot
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.engine import Engine
from scheduler_svc.errors import ApiKeyUnknown, InvalidArgument
from scheduler_svc.executor_session import ExecutorSession
from scheduler_svc.security.gate import Gate

_DEFAULT_INTERVAL_MS = 500
_MIN_INTERVAL_MS, _MAX_INTERVAL_MS = 20, 60_000

Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer:
    """Shows the engine's state; changes nothing."""

    def __init__(self, engine: Engine, scheduler_id: str, gate: Gate) -> None:
        """Show this engine.

        Args:
            engine: whose sessions are shown.
            scheduler_id: name of this process.
            gate: says whether the key of a watch is still good.
        """
        self._engine = engine
        self._scheduler_id = scheduler_id
        self._gate = gate

    async def snapshot(
        self, request: admin_pb2.SnapshotRequest | Malformed, context: Context
    ) -> admin_pb2.SnapshotResponse:
        """Return one snapshot."""
        if isinstance(request, Malformed):
            await status.abort(context, status.from_error(request.error))
        return admin_pb2.SnapshotResponse(
            snapshot=self._take(request.include_sequences, request.include_blocks)
        )

    async def watch(self, request: admin_pb2.WatchRequest | Malformed, context: Context) -> None:
        """Write a snapshot at every interval until the client, or its key, is gone."""
        if isinstance(request, Malformed):
            await status.abort(context, status.from_error(request.error))
        interval = request.interval_ms or _DEFAULT_INTERVAL_MS
        if not _MIN_INTERVAL_MS <= interval <= _MAX_INTERVAL_MS:
            bound = f"0 or between {_MIN_INTERVAL_MS} and {_MAX_INTERVAL_MS}"
            await status.abort(
                context, status.from_error(InvalidArgument("interval_ms", bound, interval))
            )
        while not self._engine.is_draining or self._engine.num_requests:
            try:
                self._gate.check_caller()
            except ApiKeyUnknown as error:
                await status.abort(context, status.from_error(error))
            taken = self._take(request.include_sequences, request.include_blocks)
            await context.write(admin_pb2.WatchResponse(snapshot=taken))
            await asyncio.sleep(interval / 1000)

    def _take(self, include_sequences: bool, include_blocks: bool) -> admin_pb2.Snapshot:
        message = admin_pb2.Snapshot(scheduler_id=self._scheduler_id)
        for session in self._engine.sessions:
            message.executors.append(_executor(session, include_sequences, include_blocks))
        return message


def add_to_server(servicer: AdminServicer, server: grpc.aio.Server) -> None:
    """Register the service with deserializers that answer bad bytes properly."""
    register(
        server,
        admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
        {"Snapshot": servicer.snapshot, "Watch": servicer.watch},
    )


def _executor(
    session: ExecutorSession, include_sequences: bool, include_blocks: bool
) -> admin_pb2.ExecutorState:
    message = admin_pb2.ExecutorState(
        address=session.address,
        connected=session.connected,
        epoch=session.epoch,
        draining=session.is_draining,
        load_tokens=session.load_tokens,
    )
    if session.core is None:
        return message
    state = session.core.state
    message.step_id = state.plan.step_id - 1
    message.num_queued = len(state.waiting)
    message.num_running = sum(len(group.live) for group in state.running)
    message.num_preempted = sum(len(group.live) for group in state.preempted)
    message.pool.CopyFrom(_pool(state))
    message.counters.CopyFrom(admin_pb2.Counters(**state.counters.as_dict()))
    if include_sequences:
        message.sequences.extend(_sequence(seq) for seq in snapshot.live_sequences(state))
    if include_blocks:
        message.blocks.ref_counts.extend(state.blocks.pool.ref_counts)
        message.blocks.kinds = snapshot.block_kinds(state)
    return message


def _pool(state: SchedulerState) -> admin_pb2.PoolState:
    counts = snapshot.count_pool(state)
    return admin_pb2.PoolState(
        block_size=state.blocks.block_size,
        num_total=counts.num_total,
        num_free=counts.num_free,
        num_cached=counts.num_cached,
        num_referenced=counts.num_referenced,
        num_shared=counts.num_shared,
        num_fenced=counts.num_fenced,
        num_host_total=counts.num_host_total,
        num_host_free=counts.num_host_free,
        live_slots=counts.live_slots,
        internal_waste_slots=counts.internal_waste_slots,
    )


def _sequence(seq: Sequence) -> admin_pb2.SequenceState:
    request = seq.group.request
    return admin_pb2.SequenceState(
        request_id=request.request_id,
        sample_index=seq.sample_index,
        row=seq.row or 0,
        status=seq.group.status.value,
        num_tokens=len(seq.tokens),
        num_computed_tokens=seq.num_computed,
        block_table=seq.block_table,
        tenant=request.tenant,
        priority=request.priority,
        num_prompt_tokens=seq.num_prompt_tokens,
    )
