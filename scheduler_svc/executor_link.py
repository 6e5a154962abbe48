"""The wire to one executor: how to open it, what to refuse, what its end means."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import grpc
from octavo.protocol import PLAN_PROTOCOL
from octavo.tls import ClientTls
from octavo.v1 import executor_pb2 as pb

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core import results
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.state import CoreConfig
from scheduler_svc.core.step import StepResult

EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs of grpc lack it
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MAX_EPOCH = 2**62
_GOODBYE_SECONDS = 1.0
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # In gRPC 1.85 it is this one that counts.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # After a loss a channel begins with a connection of its own, not with what gRPC kept.
    ("grpc.use_local_subchannel_pool", 1),
)


class ExecutorLost(Exception):
    """The executor cannot be used now; the message says why in one line."""


class ExecutorDied(ExecutorLost):
    """It vanished or hangs, and what it had in flight may be the reason."""


class StepFailed(ExecutorLost):
    """A step failed and said so: the executor lives, without rows."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What an executor said of its owner and of all schedulers, and when.

    Attributes:
        instance: the process, wherever it was reached.
        at: monotonic seconds.
    """

    owner: str
    schedulers: tuple[str, ...]
    instance: str
    at: float


def open_channel(address: str, tls: ClientTls | None) -> grpc.aio.Channel:
    """Open a channel, with the certificates of this moment."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
    options = (*_CHANNEL_OPTIONS, *tls.options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def check(description: pb.DescribeResponse | None, expected: str, model: str) -> None:
    """Refuse an executor that cannot be ours, whoever owns it.

    Args:
        description: what it said.
        expected: fingerprint of the model served; "" accepts any.
        model: its name, for the message.
    Raises:  ExecutorLost: naming both versions, both fingerprints, or the epoch.
    """
    if description is None:
        raise ExecutorLost("it sent bytes that are no description")
    if description.plan_protocol != PLAN_PROTOCOL:
        raise ExecutorLost(
            f"speaks version {description.plan_protocol} of the plan protocol (octavo "
            f"{description.octavo_version}), this scheduler speaks version {PLAN_PROTOCOL}"
        )
    found = description.fingerprint
    if expected and found and expected != found:
        raise ExecutorLost(
            f"serves another model: its fingerprint is {found} ({description.model}), "
            f"this scheduler's is {expected} ({model})"
        )
    if description.epoch >= _MAX_EPOCH:
        raise ExecutorLost(f"reports epoch {description.epoch}, beyond all that are claimed")


async def claim(call: Any, epoch: int, message: pb.Claim) -> pb.DescribeResponse:
    """Claim an executor by the first plan of a stream; give what it answers.

    Raises:  ExecutorLost: if it refuses.
    """
    await call.write(pb.StepPlan(epoch=epoch, claim=message))
    answer = await call.read()
    if answer is EOF:
        raise ExecutorLost("it ended the stream before it answered the claim")
    if answer is None or not answer.HasField("description"):
        raise ExecutorLost("it answered the claim with something else")
    return answer.description  # type: ignore[no-any-return]  # the stub is untyped


def check_result(
    core: Scheduler, result: StepResult, description: pb.DescribeResponse | None, is_ours: bool
) -> None:
    """See that a result is one, before any of it is taken in.

    Args:
        core: whose step it should answer.
        result: of the executor.
        description: of the executor.
        is_ours: it is of the present epoch.
    Raises:  ExecutorLost: naming what is wrong with it.
    """
    if not is_ours:
        raise ExecutorLost(f"it answered step {result.step_id} of another epoch")
    fault = results.find_fault(core.state, result, description.vocab_size if description else 0)
    if fault is not None:
        raise ExecutorLost(fault)


def core_config(
    config: SchedulerConfig, description: pb.DescribeResponse, budget_cap: int
) -> CoreConfig:
    """Give the limits of a core for one executor: the least of both sides.

    Args:
        config: the service's settings.
        description: of the executor.
        budget_cap: tokens of a step that its memory was seen to allow.
    """
    budget = min(config.max_num_batched_tokens, description.max_num_batched_tokens, budget_cap)
    return CoreConfig(
        num_blocks=description.num_device_blocks,
        block_size=description.block_size,
        num_host_blocks=description.num_host_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=min(config.max_num_seqs, description.max_num_rows, budget - 1),
        max_queue=config.max_queue,
        max_queue_seconds=config.max_queue_seconds,
        watermark=config.watermark,
        max_steps_in_flight=config.max_steps_in_flight,
        preemption=config.preemption,
        policy=config.policy,
        prefix_cache=config.prefix_cache,
    )


async def say_goodbye(call: Any, writer: asyncio.Task[None]) -> None:
    """End a stream in order, so that the executor is free at once; but wait for nobody long."""
    errors = (TimeoutError, grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
    with contextlib.suppress(*errors):
        async with asyncio.timeout(_GOODBYE_SECONDS):
            await asyncio.wait({writer})
            await call.done_writing()
            await call.code()
