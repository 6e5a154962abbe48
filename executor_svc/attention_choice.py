"""Which kernels serve a pool: decided once, when the executor starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo_kernels.checks import BLOCK_SIZES, MAX_HEAD_DIM
from octavo_kernels.cpu.build import KernelsUnavailable
from octavo_kernels.cpu.library import library
from octavo_kernels.cpu.plans import why_unsupported

from executor_svc.attention import AttentionStep, ReferenceStep
from executor_svc.batch import StepBatch
from executor_svc.compiled_attention import CompiledStep
from executor_svc.errors import StartupError
from executor_svc.logs import get_logger
from executor_svc.pool import KvPool

_log = get_logger(__name__)

MakeStep = Callable[[StepBatch], AttentionStep]


@dataclass(frozen=True, slots=True)
class Attention:
    """An implementation that serves a pool: its name, and how a step of it is made."""

    name: str
    make_step: MakeStep


class _Unusable(Exception):
    """An implementation cannot serve this pool; the message says why."""


def choose_attention(wanted: str, pool: KvPool) -> Attention:
    """Take the wanted implementation, or for "auto" the fastest that serves the pool.

    Where that is the reference only because the fast one is unusable, one line of the
    log says why.

    Args:
        wanted: "auto", "compiled", "triton" or "reference".
        pool: the executor's.

    Raises:
        StartupError: if the wanted one cannot serve the pool.
    """
    name = wanted
    if wanted == "auto":
        name = "compiled" if pool.device_blocks.device.type == "cpu" else "triton"
    try:
        return Attention(name, _MAKERS[name](pool))
    except _Unusable as reason:
        if wanted != "auto":
            raise StartupError(f"--attention {wanted}: {reason}") from reason
        _log.warning("attention_fell_back", wanted=name, used="reference", reason=str(reason))
        return Attention("reference", _reference(pool))


def _reference(pool: KvPool) -> MakeStep:
    device = pool.device_blocks.device
    return lambda batch: ReferenceStep(pool, batch, device)


def _compiled(pool: KvPool) -> MakeStep:
    if pool.device_blocks.device.type != "cpu":
        raise _Unusable(f"the pool is on {pool.device_blocks.device}, not on a CPU")
    if reason := why_unsupported(pool.shape.head_dim, pool.shape.dtype):
        raise _Unusable(reason)
    try:
        library()
    except KernelsUnavailable as error:
        raise _Unusable(str(error)) from error
    return lambda batch: CompiledStep(pool, batch)


def _triton(pool: KvPool) -> MakeStep:
    device = pool.device_blocks.device
    if device.type != "cuda":
        raise _Unusable(f"the pool is on {device}, not on a GPU")
    if pool.block_size not in BLOCK_SIZES:
        raise _Unusable(f"block size {pool.block_size} is none of {BLOCK_SIZES}")
    if pool.shape.head_dim > MAX_HEAD_DIM or pool.shape.head_dim % 8:
        raise _Unusable(f"head_dim {pool.shape.head_dim} is not a multiple of 8 up to 256")
    try:
        from octavo_kernels.triton_ops.splits import Scratch

        from executor_svc.triton_attention import TritonStep
    except ImportError as error:
        raise _Unusable(str(error)) from error
    scratch = Scratch(device)
    return lambda batch: TritonStep(pool, batch, device, scratch)


_MAKERS: dict[str, Callable[[KvPool], MakeStep]] = {
    "compiled": _compiled,
    "triton": _triton,
    "reference": _reference,
}
