"""One executor as the scheduler holds it: a core, a claim, a stream of plans.

    connect -> Describe -> claim (a higher epoch) -> plans out, results in
        ^                                                   │
        └──── back-off <── lost: error, hang, mismatch <────┘

The core outlives the connection: when the executor comes back, every request that ran
is computed again from the tokens that the core holds, in its old place. Two tasks share
the connection. One writes plans whenever it is woken (a new request, a result, a
cancel); one reads results, applies them and wakes the other. Neither waits for the
other, so the executor holds the next plan before it finishes the current one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import structlog
from octavo.tls import ClientTls
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import executor_pb2_grpc

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import CoreConfig, Outcome
from scheduler_svc.core.step import StepErrorKind
from scheduler_svc.translation import plan_to_proto, result_from_proto

_log = structlog.get_logger()

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs of grpc lack it
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MAX_EPOCH = 2**62
_MIN_BACKOFF_SECONDS = 0.1
_MAX_BACKOFF_SECONDS = 2.0
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


class ExecutorLost(Exception):
    """The executor cannot be used now; the message says why in one line."""


class ExecutorSession:
    """Plans for one executor and takes its results, across connections.

    Attributes:
        core: the scheduler core; None until the executor was first described.
        description: what the executor said of itself; None until then.
        connected: the claim holds.
    """

    def __init__(
        self,
        address: str,
        config: SchedulerConfig,
        fingerprint: str,
        on_outcome: Callable[[Scheduler, Outcome], None],
    ) -> None:
        """Prepare; `run` connects.

        Args:
            address: HOST:PORT of the executor.
            config: the service's settings.
            fingerprint: of the model served; "" accepts any.
            on_outcome: called after every step and cancel with what happened.
        Raises:  TlsError: if the files of the TLS to executors cannot be used.
        """
        self.address = address
        self.core: Scheduler | None = None
        self.description: pb.DescribeResponse | None = None
        self.connected = False
        self.last_error = "not connected yet"
        self.epoch = 0
        self._config = config
        self._fingerprint = fingerprint
        self._on_outcome = on_outcome
        files = config.executor_files
        self._tls = None if files is None else ClientTls(files, config.executor_server_name)
        self._wake = asyncio.Event()
        self._last_progress = time.monotonic()
        # Halved whenever the executor runs out of memory in a step.
        self._budget_cap = config.max_num_batched_tokens

    # -- what the engine calls -----------------------------------------------------

    def wake(self) -> None:
        """Look for work: a request came, went, or is to be planned."""
        self._wake.set()

    def deliver(self) -> None:
        """Hand on what happened in the core since the last time."""
        if self.core is not None:
            self._on_outcome(self.core, self.core.take_outcome())

    @property
    def is_stalled(self) -> bool:
        """Steps are in flight and none has come back for too long."""
        return self._oldest_wait() > self._config.step_timeout_seconds

    @property
    def load_tokens(self) -> int:
        """Tokens of all requests that this executor has yet to finish, roughly."""
        if self.core is None:
            return 0
        groups = self.core.state.groups.values()
        return sum(len(g.request.prompt_tokens) + g.request.max_tokens for g in groups)

    async def run(self) -> None:
        """Keep the executor claimed and fed until cancelled."""
        backoff = _MIN_BACKOFF_SECONDS
        while True:
            started = time.monotonic()
            try:
                await self._connect_and_serve()
            except ExecutorLost as lost:
                self._note_lost(str(lost))
            except grpc.aio.AioRpcError as error:
                self._note_lost(f"{error.code().name}: {error.details()}")
            if time.monotonic() - started > _MAX_BACKOFF_SECONDS:
                backoff = _MIN_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)

    # -- one connection ------------------------------------------------------------

    async def _connect_and_serve(self) -> None:
        timeout = self._config.claim_timeout_seconds
        async with self._channel() as channel:
            stub = executor_pb2_grpc.ExecutorServiceStub(channel)
            description = await stub.Describe(pb.DescribeRequest(), timeout=timeout)
            self._check(description)
            call: Any = stub.Run()  # type: ignore[call-arg]  # grpc.aio takes no iterator to write
            try:
                description = await asyncio.wait_for(self._claim(call, description), timeout)
                self._begin(description)
                await self._serve(call)
            except TimeoutError as error:
                raise ExecutorLost(f"did not answer the claim within {timeout:g} s") from error
            finally:
                self.connected = False
                call.cancel()

    def _channel(self) -> grpc.aio.Channel:
        """Open a channel, with the certificates of this moment."""
        if self._tls is None:
            return grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        options = (*_CHANNEL_OPTIONS, *self._tls.options)
        return grpc.aio.secure_channel(self.address, self._tls.credentials(), options=options)

    async def _claim(self, call: Any, described: pb.DescribeResponse) -> pb.DescribeResponse:
        self.epoch = max(self.epoch, described.epoch) + 1
        claim = pb.Claim(
            scheduler_id=self._config.scheduler_id,
            fingerprint=self._fingerprint,
            block_size=self.description.block_size if self.description else 0,
        )
        await call.write(pb.StepPlan(epoch=self.epoch, claim=claim))
        answer = await call.read()
        if answer is _EOF:
            raise ExecutorLost(f"{(await call.code()).name}: {await call.details()}")
        return answer.description  # type: ignore[no-any-return]  # the stub is untyped

    def _check(self, description: pb.DescribeResponse) -> None:
        """Refuse an executor that is not ours to claim.

        A live owner is not robbed: an executor whose owner is gone says so, and only then
        is it free (a scheduler that is cut off stops answering its keep-alives).
        """
        expected, found = self._fingerprint, description.fingerprint
        if expected and found and expected != found:
            raise ExecutorLost(
                f"serves another model: its fingerprint is {found} ({description.model}), "
                f"this scheduler's is {expected} ({self._config.model})"
            )
        if description.owner not in ("", self._config.scheduler_id):
            raise ExecutorLost(f"is owned by scheduler {description.owner}")
        if description.epoch >= _MAX_EPOCH:
            raise ExecutorLost(f"reports epoch {description.epoch}, beyond all that are claimed")

    def _begin(self, description: pb.DescribeResponse) -> None:
        """Start, or go on, with an executor that has no rows."""
        core_config = self._core_config(description)
        if self.core is None:
            self.core = Scheduler(core_config)
        else:
            self.core.restart(core_config)
        self.description = description
        self.connected = True
        self.last_error = ""
        self._last_progress = time.monotonic()
        self._wake.set()
        _log.info(
            "executor_claimed",
            executor=self.address,
            epoch=self.epoch,
            num_blocks=description.num_device_blocks,
            block_size=description.block_size,
            dtype=description.dtype,
        )

    def _core_config(self, description: pb.DescribeResponse) -> CoreConfig:
        config = self._config
        budget = min(
            config.max_num_batched_tokens, description.max_num_batched_tokens, self._budget_cap
        )
        num_seqs = min(config.max_num_seqs, description.max_num_rows, budget - 1)
        return CoreConfig(
            num_blocks=description.num_device_blocks,
            block_size=description.block_size,
            num_host_blocks=description.num_host_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=num_seqs,
            max_queue=config.max_queue,
            watermark=config.watermark,
            max_steps_in_flight=config.max_steps_in_flight,
            preemption=config.preemption,
            policy=config.policy,
            prefix_cache=config.prefix_cache,
        )

    async def _serve(self, call: Any) -> None:
        tasks = [
            asyncio.create_task(self._write_plans(call)),
            asyncio.create_task(self._read_results(call)),
            asyncio.create_task(self._watch_progress()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write_plans(self, call: Any) -> None:
        core = self.core
        assert core is not None
        while True:
            await self._wake.wait()
            self._wake.clear()
            while True:
                plan = core.plan(time.monotonic())
                self.deliver()
                if plan is None:
                    core.name_blocks()
                    break
                if len(core.state.in_flight) == 1:
                    self._last_progress = time.monotonic()
                await call.write(plan_to_proto(plan, self.epoch))

    async def _read_results(self, call: Any) -> None:
        core = self.core
        assert core is not None
        while True:
            message = await call.read()
            if message is _EOF:
                raise ExecutorLost(f"{(await call.code()).name}: {await call.details()}")
            result = result_from_proto(message)
            if result.error is not None:
                core.fail(result.error)
                self.deliver()
                if result.error.kind is StepErrorKind.OUT_OF_MEMORY:
                    self._budget_cap = max(2, core.state.config.max_num_batched_tokens // 2)
                kind, reason = result.error.kind.value, result.error.message
                raise ExecutorLost(f"step {result.step_id} failed ({kind}): {reason}")
            core.apply(result)
            self._last_progress = time.monotonic()
            self.deliver()
            self._wake.set()

    async def _watch_progress(self) -> None:
        timeout = self._config.step_timeout_seconds
        while True:
            await asyncio.sleep(min(1.0, timeout / 4))
            if self.is_stalled:
                raise ExecutorLost(f"no result for {timeout:g} s")

    def _oldest_wait(self) -> float:
        if self.core is None or not self.core.state.in_flight:
            return 0.0
        return time.monotonic() - self._last_progress

    def _note_lost(self, reason: str) -> None:
        was_new = reason != self.last_error
        self.last_error = reason
        if not was_new:
            return
        if self.description is None:
            _log.info("executor_awaited", executor=self.address, reason=reason)
        else:
            _log.warning("executor_lost", executor=self.address, reason=reason)
