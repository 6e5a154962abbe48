"""One executor as the scheduler holds it: a core, a claim, a stream of plans.

    connect -> Describe, every second -> claim (a higher epoch) -> plans out, results in
        ^          ^                                                     │
        │          └──── left: given back, or it drains <────────────────┤
        └─────── back-off <── lost: error, hang, mismatch <──────────────┘

The core outlives the connection: its requests wait in it until it is back, or are taken
to another one (fleet.py). Three tasks share the connection. One writes plans whenever it
is woken (a new request, a result, a cancel); one reads results, applies them and wakes the
other; one asks the executor every second who else is there. None waits for another, so
the executor holds the next plan before it finishes the current one.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import structlog
from octavo.tls import ClientTls
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepError, StepErrorKind
from scheduler_svc.executor_link import (
    EOF,
    ExecutorDied,
    ExecutorLost,
    Seen,
    StepFailed,
    check,
    check_result,
    claim,
    core_config,
    open_channel,
    say_goodbye,
)
from scheduler_svc.observation.step_log import StepLog
from scheduler_svc.session_owner import SessionOwner
from scheduler_svc.step_deadline import StepClock
from scheduler_svc.translation import plan_to_proto, result_from_proto

_log = structlog.get_logger()

_MIN_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 0.5
_POLL_SECONDS = 1.0
_WATCH_SECONDS = 0.25


class ExecutorSession:
    """Plans for one executor and takes its results, across connections.

    Attributes:
        core: the scheduler core; None until the executor was first claimed.
        description: what the executor said of itself; None until then.
        connected: the claim holds, and plans flow.
        is_claiming: a claim is on its way.
        is_draining: the executor is shutting down.
        seen: its last answer; None if it does not answer.
        lost_at: when the claim ended, in monotonic seconds.
        steps: those that were executed lately.
    """

    def __init__(
        self,
        address: str,
        config: SchedulerConfig,
        fingerprint: str,
        owner: SessionOwner,
        server_name: str = "",
    ) -> None:
        """Prepare; `run` connects.

        Args:
            address: HOST:PORT of the executor.
            config: the service's settings.
            fingerprint: of the model served; "" accepts any.
            owner: is told what happens.
            server_name: that the executor's certificate carries; "": the address's host.
        Raises:  TlsError: if the files of the TLS to executors cannot be used.
        """
        self.address = address
        self.core: Scheduler | None = None
        self.description: pb.DescribeResponse | None = None
        self.connected = False
        self.is_claiming = False
        self.is_draining = False
        self.seen: Seen | None = None
        self.lost_at = time.monotonic()
        self.last_error = "not connected yet"
        self.epoch = 0
        self.steps = StepLog(address, owner.observer.spans)
        self._is_accepted = False
        self._config = config
        self._fingerprint = fingerprint
        self._owner = owner
        files = config.executor_files
        self._tls = None if files is None else ClientTls(files, server_name)
        self._wake = asyncio.Event()
        self._left = asyncio.Event()
        self._clock = StepClock(config.min_step_timeout_seconds, config.step_timeout_seconds)
        # Halved whenever the executor runs out of memory in a step.
        self._budget_cap = config.max_num_batched_tokens

    # -- what the engine calls -----------------------------------------------------

    def wake(self) -> None:
        """Look for work: a request came, went, or is to be planned."""
        self._wake.set()

    def deliver(self) -> None:
        """Hand on what happened in the core since the last time."""
        if self.core is not None:
            self._owner.deliver(self, self.core.take_outcome())

    def leave(self) -> None:
        """Give the executor back, at once: nothing more is planned or taken in."""
        self.connected = False
        self.lost_at = time.monotonic()
        self.steps.lose("the executor was given back")
        self._left.set()
        self._wake.set()

    @property
    def takes_requests(self) -> bool:
        """New work may go here."""
        return self.connected and not self.is_draining

    @property
    def is_stalled(self) -> bool:
        """Steps are in flight and none has come back for too long."""
        if self.core is None or not self.core.state.in_flight:
            return False
        return self._clock.is_late(self.core.state.in_flight[0].num_tokens)

    @property
    def load_tokens(self) -> int:
        """Tokens still to be computed for the requests here, at most."""
        return 0 if self.core is None else self.core.state.load_tokens

    async def run(self) -> None:
        """Keep the executor claimed and fed, as far as it is ours, until cancelled."""
        backoff = _MIN_BACKOFF_SECONDS
        while True:
            started = time.monotonic()
            try:
                async with open_channel(self.address, self._tls) as channel:
                    await self._follow(executor_pb2_grpc.ExecutorServiceStub(channel))
            except StepFailed as failed:
                self._note_lost(str(failed))
            except ExecutorLost as lost:
                self._end(str(lost), is_silent=isinstance(lost, ExecutorDied))
            except grpc.aio.AioRpcError as error:
                is_refusal = error.code() is grpc.StatusCode.FAILED_PRECONDITION
                is_silent = not (is_refusal or self.is_draining)
                self._end(f"{error.code().name}: {error.details()}", is_silent=is_silent)
            except (grpc.aio.BaseError, asyncio.InvalidStateError) as error:
                self._end(f"gRPC: {error}", is_silent=True)
            if time.monotonic() - started > _MAX_BACKOFF_SECONDS:
                backoff = _MIN_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    def _end(self, reason: str, *, is_silent: bool) -> None:
        """The executor is gone: say so, blame who has to be, and let its requests move on."""
        self.seen = None
        self.is_draining = self._is_accepted = False
        self._clock.forget()
        self._budget_cap = self._config.max_num_batched_tokens
        self._note_lost(reason)
        self.steps.lose(reason)
        if self.core is None:
            return
        self.core.lose(reason, is_silent=is_silent)
        self.deliver()
        self._owner.note_change()

    # -- one connection ------------------------------------------------------------

    async def _follow(self, stub: executor_pb2_grpc.ExecutorServiceStub) -> None:
        """Ask, and claim whenever the executor is free and should be ours."""
        while True:
            described = await self._describe(stub)
            if described.owner in ("", self._config.scheduler_id) and self._may_claim(described):
                await self._claim_and_serve(stub, described)
            else:
                self._note_lost(self._why_not(described))
                await asyncio.sleep(_POLL_SECONDS)

    async def _describe(self, stub: executor_pb2_grpc.ExecutorServiceStub) -> pb.DescribeResponse:
        """Ask what the executor is, and remember whom it knows.

        Raises:  ExecutorLost: if it is none of ours.
        """
        # Who is about to leave, or cannot use it, does not count among those that share it.
        is_contender = self._is_accepted and not self._owner.is_draining
        name = self._config.scheduler_id if is_contender else ""
        request = pb.DescribeRequest(scheduler_id=name)
        described: pb.DescribeResponse = await stub.Describe(  # type: ignore[misc]  # typed as if blocking
            request, timeout=self._config.claim_timeout_seconds
        )
        check(described, self._fingerprint, self._config.model)
        self._is_accepted = True
        known = tuple(described.schedulers)
        self.seen = Seen(described.owner, known, described.instance, time.monotonic())
        if described.draining is not self.is_draining:
            self.is_draining = described.draining
            self._owner.note_change()
        return described

    def _may_claim(self, described: pb.DescribeResponse) -> bool:
        return not described.draining and self._owner.may_claim(self)

    def _why_not(self, described: pb.DescribeResponse) -> str:
        if described.owner not in ("", self._config.scheduler_id):
            return f"is owned by scheduler {described.owner}"
        return "is shutting down" if described.draining else "is left to others"

    async def _claim_and_serve(
        self, stub: executor_pb2_grpc.ExecutorServiceStub, described: pb.DescribeResponse
    ) -> None:
        timeout = self._config.claim_timeout_seconds
        self.is_claiming = True
        self._left.clear()
        call: Any = stub.Run()  # type: ignore[call-arg]  # grpc.aio takes no iterator to write
        try:
            try:
                async with asyncio.timeout(timeout):
                    description = await self._claim(call, described)
            except TimeoutError as error:
                raise ExecutorLost(f"did not answer the claim within {timeout:g} s") from error
            self._begin(description)
            await self._serve(stub, call)
        finally:
            self.is_claiming = False
            if self.connected:
                self.leave()
            call.cancel()

    async def _claim(self, call: Any, described: pb.DescribeResponse) -> pb.DescribeResponse:
        self.epoch = max(self.epoch, described.epoch) + 1
        message = pb.Claim(
            scheduler_id=self._config.scheduler_id,
            fingerprint=self._fingerprint,
            block_size=self.description.block_size if self.description else 0,
        )
        return await claim(call, self.epoch, message)

    def _begin(self, description: pb.DescribeResponse) -> None:
        """Start, or go on, with an executor that has no rows."""
        config = core_config(self._config, description, self._budget_cap)
        if self.core is None:
            self.core = Scheduler(config)
        else:
            self.core.restart(config)
        self.description = description
        self.connected = True
        self.is_claiming = False
        self.last_error = ""
        self._clock.start()
        self._wake.set()
        _log.info(
            "executor_claimed",
            executor=self.address,
            epoch=self.epoch,
            num_blocks=description.num_device_blocks,
            block_size=description.block_size,
            dtype=description.dtype,
        )
        self._owner.note_change()

    async def _serve(self, stub: executor_pb2_grpc.ExecutorServiceStub, call: Any) -> None:
        """Feed the executor until it is left.

        Raises:  ExecutorLost, AioRpcError: if it is lost.
        """
        writer = asyncio.create_task(self._write_plans(call))
        tasks = [
            writer,
            asyncio.create_task(self._read_results(call)),
            asyncio.create_task(self._watch_progress()),
            asyncio.create_task(self._keep_asking(stub)),
            asyncio.create_task(self._left.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not self._left.is_set():
                for task in done:
                    task.result()
        except asyncio.CancelledError:
            self.leave()
            raise
        finally:
            if self._left.is_set():
                # Before the tasks are cancelled: gRPC cancels the call with a read of it.
                await say_goodbye(call, writer)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write_plans(self, call: Any) -> None:
        core = self.core
        assert core is not None
        while self.connected:
            await self._wake.wait()
            self._wake.clear()
            while self.connected:
                began_ns = time.monotonic_ns()
                plan = core.plan(began_ns / 1e9)
                self.deliver()
                if plan is None:
                    core.name_blocks()
                    break
                if len(core.state.in_flight) == 1:
                    self._clock.start()
                message = plan_to_proto(plan, self.epoch)
                self.steps.begin(began_ns, plan, core.state.in_flight[-1], message)
                try:
                    await call.write(message)
                except asyncio.InvalidStateError:
                    # The stream has ended; who reads from it knows why.
                    await asyncio.sleep(_POLL_SECONDS)
                    raise ExecutorDied("the stream of plans has ended") from None

    async def _read_results(self, call: Any) -> None:
        core = self.core
        assert core is not None
        while True:
            message = await call.read()
            if not self.connected:
                if message is EOF:
                    return
                continue
            if message is EOF:
                raise ExecutorLost("it ended the stream")
            if message is None:
                raise ExecutorLost("it sent bytes that are no result")
            if message.draining:
                _log.info("executor_drains", executor=self.address)
                self.is_draining = True
                self._owner.note_change()
                continue
            result = result_from_proto(message)
            check_result(core, result, self.description, message.epoch == self.epoch)
            if result.error is not None:
                self._fail(core, result.step_id, result.error)
            num_tokens = core.state.in_flight[0].num_tokens
            core.apply(result)
            self._clock.note_result(num_tokens)
            self.deliver()
            self._owner.observer.meter.note_step(self.address, self.steps.end(result.timings))
            self._wake.set()

    def _fail(self, core: Scheduler, step_id: int, error: StepError) -> None:
        """Take in that a step failed: the executor has no rows any more.

        Raises:  StepFailed: always.
        """
        self.connected = False
        self.lost_at = time.monotonic()
        core.fail(error)
        self.deliver()
        self.steps.lose(error.message)
        if error.kind is StepErrorKind.OUT_OF_MEMORY:
            self._budget_cap = max(2, core.state.config.max_num_batched_tokens // 2)
        raise StepFailed(f"step {step_id} failed ({error.kind.value}): {error.message}")

    async def _keep_asking(self, stub: executor_pb2_grpc.ExecutorServiceStub) -> None:
        """Stay known to the executor, and see who else is there; the stream tells of failures."""
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                await self._describe(stub)
            except grpc.aio.AioRpcError as error:
                _log.debug("describe_failed", executor=self.address, reason=error.details())

    async def _watch_progress(self) -> None:
        interval = min(_WATCH_SECONDS, self._config.step_timeout_seconds / 4)
        while True:
            due = time.monotonic() + interval
            await asyncio.sleep(interval)
            # If it was this process that stood still, results may be here, unread.
            self._clock.excuse(time.monotonic() - due)
            if self.is_stalled:
                raise ExecutorDied(f"no result for {self._clock.waited:.1f} s")

    def _note_lost(self, reason: str) -> None:
        was_new = reason != self.last_error
        self.last_error = reason
        if not was_new:
            return
        if self.description is None:
            _log.info("executor_awaited", executor=self.address, reason=reason)
        else:
            _log.warning("executor_lost", executor=self.address, reason=reason)
