"""AdminService: the pool, the queue and every sequence, as they are between two steps."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any

import grpc
from octavo.v1 import admin_pb2

from scheduler_svc.api import bounds, status
from scheduler_svc.api.codec import Malformed, register
from scheduler_svc.core import snapshot
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.engine import Engine
from scheduler_svc.errors import ApiKeyUnknown, InvalidArgument, ReaderStalled, UnknownRequest
from scheduler_svc.executor_session import ExecutorSession
from scheduler_svc.observation.history import MAX_STORIES, Story
from scheduler_svc.observation.observer import Observer
from scheduler_svc.security.gate import Gate

_DEFAULT_INTERVAL_MS = 500
_MIN_INTERVAL_MS, _MAX_INTERVAL_MS = 20, 60_000

Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer:
    """Shows the engine's state; changes nothing."""

    def __init__(
        self,
        engine: Engine,
        scheduler_id: str,
        gate: Gate,
        reader_timeout_seconds: float = math.inf,
    ) -> None:
        """Show this engine.

        Args:
            engine: whose sessions are shown.
            scheduler_id: name of this process.
            gate: says whether the key of a watch is still good.
            reader_timeout_seconds: a watcher that takes nothing for so long is given up.
        """
        self._engine = engine
        self._scheduler_id = scheduler_id
        self._gate = gate
        self._reader_timeout_seconds = reader_timeout_seconds

    async def snapshot(
        self, request: admin_pb2.SnapshotRequest | Malformed, context: Context
    ) -> admin_pb2.SnapshotResponse:
        """Return one snapshot."""
        if isinstance(request, Malformed):
            await status.abort(context, status.from_error(request.error))
        taken = self._take(request.include_sequences, request.include_blocks, {})
        return admin_pb2.SnapshotResponse(snapshot=taken)

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
        num_seen = {session: session.steps.num_ended for session in self._sessions()}
        while not self._engine.is_draining or self._engine.num_requests:
            try:
                self._gate.check_caller()
            except ApiKeyUnknown as error:
                await status.abort(context, status.from_error(error))
            taken = self._take(request.include_sequences, request.include_blocks, num_seen)
            num_seen = {session: session.steps.num_ended for session in self._sessions()}
            try:
                async with asyncio.timeout(self._reader_timeout_seconds):
                    await context.write(admin_pb2.WatchResponse(snapshot=taken))
            except TimeoutError:
                seconds = f"{self._reader_timeout_seconds:g}"
                stalled = ReaderStalled(f"the watcher took nothing for {seconds} seconds")
                await status.abort(context, status.from_error(stalled))
            await asyncio.sleep(interval / 1000)

    async def explain(
        self, request: admin_pb2.ExplainRequest | Malformed, context: Context
    ) -> admin_pb2.ExplainResponse:
        """Tell the story of one request."""
        if isinstance(request, Malformed):
            await status.abort(context, status.from_error(request.error))
        story = self._engine.observer.history.find(request.request_id)
        if story is None:
            shown = bounds.shown(request.request_id)
            error = UnknownRequest(f"request {shown} is not among the latest {MAX_STORIES} here")
            await status.abort(context, status.from_error(error))
        return _story(story, self._engine.num_generated_tokens(story.request_id))

    def _sessions(self) -> list[ExecutorSession]:
        return self._engine.sessions

    def _take(
        self,
        include_sequences: bool,
        include_blocks: bool,
        num_seen: Mapping[ExecutorSession, int],
    ) -> admin_pb2.Snapshot:
        """Take a snapshot, with the steps after the first so many of each session."""
        message = admin_pb2.Snapshot(
            scheduler_id=self._scheduler_id,
            latency=_latency(self._engine.observer),
            time_unix_ns=time.time_ns(),
        )
        for session in self._sessions():
            shown = _executor(session, include_sequences, include_blocks)
            samples = session.steps.since(num_seen.get(session, 0))
            shown.steps.extend(sample.to_proto() for sample in samples)
            message.executors.append(shown)
        return message


def add_to_server(servicer: AdminServicer, server: grpc.aio.Server) -> None:
    """Register the service with deserializers that answer bad bytes properly."""
    register(
        server,
        admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
        {"Snapshot": servicer.snapshot, "Watch": servicer.watch, "Explain": servicer.explain},
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
    message.num_draining_rows = len(state.plan.finish_rows) if state.in_flight else 0
    message.pool.CopyFrom(_pool(state))
    message.counters.CopyFrom(admin_pb2.Counters(**state.counters.as_dict()))
    if include_sequences:
        message.sequences.extend(_sequence(seq) for seq in snapshot.live_sequences(state))
    if include_blocks:
        message.blocks.ref_counts.extend(state.blocks.pool.ref_counts)
        message.blocks.kinds = snapshot.block_kinds(state)
    return message


def _latency(observer: Observer) -> admin_pb2.LatencyState:
    num_first, (ttft_p50, ttft_p99) = observer.ttft.percentiles(50, 99)
    num_later, (itl_p50, itl_p99) = observer.itl.percentiles(50, 99)
    return admin_pb2.LatencyState(
        num_first_tokens=num_first,
        ttft_p50_seconds=ttft_p50,
        ttft_p99_seconds=ttft_p99,
        num_later_tokens=num_later,
        itl_p50_seconds=itl_p50,
        itl_p99_seconds=itl_p99,
    )


def _story(story: Story, num_live_tokens: int) -> admin_pb2.ExplainResponse:
    return admin_pb2.ExplainResponse(
        request_id=story.request_id,
        tenant=story.tenant,
        priority=story.priority,
        num_prompt_tokens=story.num_prompt_tokens,
        num_generated_tokens=story.num_generated_tokens + num_live_tokens,
        num_events_dropped=story.num_dropped,
        trace_id=story.trace_id,
        events=[
            admin_pb2.RequestEvent(
                kind=admin_pb2.RequestEvent.Kind.Value(f"KIND_{event.kind.name}"),
                time_unix_ns=event.time_unix_ns,
                executor=event.executor,
                other_request_id=event.other_request_id,
                detail=event.detail,
                num_tokens=event.num_tokens,
            )
            for event in story
        ],
    )


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
