"""One replica of a model: a deterministic function of the plans that it is given.

Synchronous and without gRPC: the device thread drives it in the service, tests and
benchmarks drive it directly.
"""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from executor_svc.attention_choice import choose_attention
from executor_svc.batch import build_batch
from executor_svc.config import ExecutorConfig
from executor_svc.drawn import DrawnTokens
from executor_svc.errors import DeviceLost, InvalidPlan, KvCheckFailed, StartupError
from executor_svc.fingerprint import fingerprint
from executor_svc.fused_layers import fuse
from executor_svc.huge_pages import populate, return_freed_memory, use_huge_pages
from executor_svc.kv_check import KvCheck
from executor_svc.logs import get_logger
from executor_svc.model_loader import LoadedModel, load_model, tokens_of_a_step
from executor_svc.model_runner import ModelRunner
from executor_svc.plan import (
    Description,
    Outcome,
    Plan,
    RowDigest,
    StepError,
    StepErrorKind,
    Timings,
)
from executor_svc.pool import KvPool
from executor_svc.pool_size import size_pool
from executor_svc.rows import Limits, RowTable
from executor_svc.sampler import row_errors, sample
from executor_svc.tensor_parallel.drawing import SharedDraw
from executor_svc.tensor_parallel.ranks import Ranks, one_line
from executor_svc.transfer import Mark

_log = get_logger(__name__)

_OF_ONE_RANK = {StepErrorKind.OUT_OF_MEMORY, StepErrorKind.INTERNAL}


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device was given.

    Attributes:
        answer: as far as it is known without the device; all of it if nothing was drawn.
        drawn: what `collect` waits for.
        prepare_ns: of the host.
        begins: where moves, forward pass and sampling begin on the device.
    """

    answer: Outcome
    drawn: DrawnTokens | None = None
    prepare_ns: int = 0
    begins: tuple[Mark, ...] = ()

    def timings(self) -> Timings:
        """Where its time went, once the device is done."""
        assert self.drawn is not None
        moves, forward, sampling = self.begins
        return Timings(
            prepare_ns=self.prepare_ns,
            forward_ns=sampling.ns_since(moves),
            move_ns=forward.ns_since(moves),
            sample_ns=self.drawn.end.ns_since(sampling),
        )


class Executor:
    """Rows, pool and model of one replica.

    Invariant: after a step that failed no row exists, and every later plan is answered
    with the same error until `reset`.
    """

    def __init__(
        self,
        rows: RowTable,
        runner: ModelRunner,
        description: Description,
        kv_check: KvCheck | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Put the parts together.

        Args:
            rows: the row table.
            runner: model and pool, or this rank's share of them.
            description: what `Describe` says.
            kv_check: the sanitizer, if it is on.
            ranks: those that carry out the same plans with their shares.
        """
        self._rows = rows
        self._draw = sample if ranks is None else SharedDraw(ranks)
        self._is_alone = ranks is None
        self._runner = runner
        self._kv_check = kv_check
        self._failure: StepError | None = None
        # Of the last step, while the row table lacks them.
        self._unsettled: DrawnTokens | None = None
        self.description = description

    @classmethod
    def load(cls, config: ExecutorConfig, folder: Path, ranks: Ranks | None = None) -> Executor:
        """Load the model in `folder` and allocate the pool.

        Args:
            config: the settings.
            folder: a Hugging Face model folder.
            ranks: those that share the model; all of them load at once.

        Raises:
            StartupError: if that is not possible; the message is one line.
            DeviceLost: if another rank is gone.
        """
        num_sharers = 1 if ranks is None else ranks.place.local_size
        torch.set_num_threads(config.num_threads or max(1, _num_cpus() // num_sharers))
        try:
            identity = fingerprint(folder)
        except (OSError, ValueError, KeyError) as error:
            raise StartupError(f"cannot read the model in {folder}: {one_line(error)}") from error
        loaded = load_model(
            folder,
            device=config.device,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            ranks=ranks,
        )
        if ranks is not None:
            ranks.require_same("model or setting", _essence(config, identity, loaded))
        on_cpu = loaded.device.type == "cpu"
        if config.fuse_layers and on_cpu:
            fuse(loaded.model)
        max_num_batched_tokens = config.max_num_batched_tokens or tokens_of_a_step(
            loaded.device, loaded.dtype
        )
        largest_step = min(max_num_batched_tokens, loaded.max_model_len)
        shape, size = size_pool(config, loaded, largest_step, ranks)
        pool = KvPool(
            shape,
            block_size=config.block_size,
            num_device_blocks=size.num_device_blocks,
            num_host_blocks=size.num_host_blocks,
            device=loaded.device,
        )
        if on_cpu:
            return_freed_memory()
            use_huge_pages()
            populate(pool.device_blocks, torch.get_num_threads())
        limits = Limits(
            max_num_rows=config.max_num_rows,
            max_model_len=loaded.max_model_len,
            block_size=config.block_size,
            num_device_blocks=size.num_device_blocks,
            num_host_blocks=size.num_host_blocks,
            vocab_size=loaded.vocab_size,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        attention = choose_attention(config.attention, pool)
        graphs = None
        if config.cuda_graphs and attention.name == "triton":
            from executor_svc.cuda_graphs import CudaRecorder, record_decodes  # need Triton

            graphs = record_decodes(loaded, pool, limits, CudaRecorder(loaded.device))
        runner = ModelRunner(loaded, pool, attention, graphs)
        description = _describe(config, identity, loaded, runner, limits)
        if ranks is not None:
            description = replace(description, tensor_parallel_size=ranks.place.size)
        kv_check = KvCheck(limits) if config.kv_check else None
        return cls(RowTable(limits), runner, description, kv_check, ranks)

    @property
    def num_rows(self) -> int:
        """How many rows exist."""
        return self._rows.num_live

    def start(self, on_lost: Callable[[BaseException], None]) -> None:
        """See `device_thread.Engine`: there is nothing that could be lost but with a step."""

    def beat(self) -> None:
        """Nobody waits to hear of it."""

    def close(self) -> None:
        """It ends with the process."""

    def reset(self) -> None:
        """Forget every row and any failure: a new owner starts from nothing."""
        self._rows.reset()
        if self._kv_check is not None:
            self._kv_check.reset()
        self._failure = None
        self._unsettled = None

    def run(self, plan: Plan) -> Outcome:
        """Carry out one step and wait for it; see `launch` and `collect`."""
        return self.collect(self.launch(plan))

    def launch(self, plan: Plan) -> Launched:
        """Give the device a step. A GPU may still be at the step before, a CPU never is.

        At most one step before it may be uncollected. A step that cannot be carried out
        is answered by `Outcome.error`.

        Raises:
            DeviceLost: if no later step can succeed either.
        """
        answer = Outcome(epoch=plan.epoch, step_id=plan.step_id)
        if self._failure is None and plan.broken is not None:
            self._fail(plan, plan.broken)
        if self._failure is not None:
            return Launched(replace(answer, error=self._failure))
        try:
            return self._launch(plan, answer)
        except DeviceLost:
            raise
        except Exception as error:
            failure = _step_error(error)
            if not self._is_alone and failure.kind in _OF_ONE_RANK:
                # The others wait in a sum for this rank, which it will not join any more.
                raise DeviceLost(failure.message) from error
            return Launched(replace(answer, error=self._fail(plan, failure)))

    def is_done(self, launched: Launched) -> bool:
        """Whether `collect` would not wait; on a CPU it never does."""
        return launched.drawn is None or launched.drawn.end.is_passed

    def collect(self, launched: Launched) -> Outcome:
        """Wait for a step, in the order of their launches, and give its answer.

        Raises:
            DeviceLost: if no later step can succeed either.
        """
        drawn = launched.drawn
        if drawn is None:
            return launched.answer
        try:
            tokens, best = drawn.wait()
        except torch.AcceleratorError as error:
            raise DeviceLost(one_line(error)) from error
        self._settle(drawn)
        return replace(
            launched.answer,
            tokens=tokens.tolist(),
            row_errors=row_errors(drawn.sample_rows, best),
            timings=launched.timings(),
        )

    def audit(self) -> list[RowDigest]:
        """Digest of every row, to be called between steps."""
        return self._rows.digests()

    def _fail(self, plan: Plan, error: StepError) -> StepError:
        _log.error(
            "step_failed",
            epoch=plan.epoch,
            step_id=plan.step_id,
            kind=error.kind.value,
            reason=error.message,
        )
        self._rows.reset()
        self._failure = error
        self._unsettled = None
        return error

    def _launch(self, plan: Plan, answer: Outcome) -> Launched:
        begin = time.perf_counter_ns()
        before = self._unsettled
        if before is not None and self._must_settle(before, plan):
            self._settle(before)
            before = None
        self._rows.apply(plan)
        batch = build_batch(self._rows, plan)
        if self._kv_check is not None:
            self._kv_check.check(plan, self._rows, batch)
        feed = None if before is None else before.feed(batch, self._rows)
        prepare_ns = time.perf_counter_ns() - begin
        moves = Mark(self._runner.device)
        self._runner.move_blocks(plan)
        forward = Mark(self._runner.device)
        if not batch.num_tokens:
            move_ns = time.perf_counter_ns() - begin - prepare_ns
            timings = Timings(prepare_ns=prepare_ns, forward_ns=move_ns, move_ns=move_ns)
            return Launched(replace(answer, timings=timings))
        with torch.inference_mode():
            logits = self._runner.forward(batch, feed)
            sampling = Mark(self._runner.device)
            samples = self._draw(logits, batch, self._rows)
            drawn = DrawnTokens(samples, batch, self._rows)
        self._unsettled = drawn
        answer = replace(answer, logprobs=samples.logprobs)
        return Launched(answer, drawn, prepare_ns, (moves, forward, sampling))

    def _must_settle(self, before: DrawnTokens, plan: Plan) -> bool:
        """Whether the host needs the tokens of the step before to lay this one out."""
        copies_rows = plan.child_rows or plan.fork_rows
        return bool(copies_rows) or self._kv_check is not None or before.needs_settling(self._rows)

    def _settle(self, drawn: DrawnTokens) -> None:
        drawn.settle(self._rows)
        if self._unsettled is drawn:
            self._unsettled = None


def _step_error(error: Exception) -> StepError:
    """What to tell the scheduler.

    Raises:
        DeviceLost: if the device will answer every later call with an error as well.
    """
    if isinstance(error, InvalidPlan):
        return StepError(StepErrorKind.INVALID_PLAN, str(error))
    if isinstance(error, KvCheckFailed):
        return StepError(StepErrorKind.KV_CHECK, str(error))
    message = f"{type(error).__name__}: {one_line(error)}"
    # A CPU allocator has no exception type of its own.
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate" in message:
        return StepError(StepErrorKind.OUT_OF_MEMORY, message)
    if isinstance(error, torch.AcceleratorError):
        raise DeviceLost(message) from error
    return StepError(StepErrorKind.INTERNAL, message)


def _essence(config: ExecutorConfig, identity: str, loaded: LoadedModel) -> str:
    """What must be the same in all ranks, in words."""
    return (
        f"model {identity}, {loaded.dtype}, {loaded.max_model_len} tokens, {config.attention} "
        f"attention, blocks of {config.block_size}, {config.num_blocks} and "
        f"{config.num_host_blocks} blocks, {config.max_num_batched_tokens} tokens a step, "
        f"{config.max_num_rows} rows, kv-check {config.kv_check}, "
        f"octavo {importlib.metadata.version('octavo')}"
    )


def _describe(
    config: ExecutorConfig,
    identity: str,
    loaded: LoadedModel,
    runner: ModelRunner,
    limits: Limits,
) -> Description:
    device = str(loaded.device)
    if loaded.device.type == "cuda":
        device = f"{device} {torch.cuda.get_device_name(loaded.device)}"
    return Description(
        model=config.model,
        fingerprint=identity,
        block_size=limits.block_size,
        num_device_blocks=limits.num_device_blocks,
        num_host_blocks=limits.num_host_blocks,
        dtype=str(loaded.dtype).removeprefix("torch."),
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_rows=limits.max_num_rows,
        vocab_size=limits.vocab_size,
        block_bytes=runner.pool.shape.block_bytes(limits.block_size),
        device=device,
        attention=runner.attention,
        octavo_version=importlib.metadata.version("octavo"),
    )


def _num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))
