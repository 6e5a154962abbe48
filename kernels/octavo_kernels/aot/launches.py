"""What the launchers launch, recorded without a device.

The public launchers run on tensors without storage. Triton believes that the target is
there; just before it would compile a kernel it hands over what it would compile, and the
launch ends. So what is compiled here is what a GPU would run: types, alignment,
constants, warps and stages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from octavo_kernels.aot.configs import TARGETS, Layer
from octavo_kernels.triton_ops.copy_blocks import copy_blocks
from octavo_kernels.triton_ops.paged_attention import paged_attention
from octavo_kernels.triton_ops.prefill_attention import prefill_attention, prefill_tiles
from octavo_kernels.triton_ops.reshape_and_cache import reshape_and_cache
from octavo_kernels.triton_ops.swap_blocks import swap_blocks
from octavo_kernels.triton_ops.tuning import TuningKey, tuning_for

_NUM_SEQS = 64
_CONTEXT_TOKENS = 8192
_NUM_SPLITS = 4
_NUM_CHUNKS = 4
_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, and all that Triton specialises it by."""

    kernel: JITFunction[Any]
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's."""
        return str(self.kernel.__name__)

    def constant(self, name: str) -> Any:
        """The value of a constant; None if the kernel has no such parameter."""
        names = self.kernel.arg_names
        return self.constants[names.index(name),] if name in names else None

    @property
    def tile_tokens(self) -> int | None:
        """Tokens whose K/V one pass of the kernel's loop reads; None if it reads none."""
        if self.constant("HEAD_DIM") is None:
            return None
        tile = self.constant("KEYS") or self.constant("TILE")
        return None if tile is None else int(tile)

    def contiguous(self) -> Launch | None:
        """The same, with arithmetic in place of the block table; None if it has no table."""
        if self.constant("CONTIGUOUS") is None:
            return None
        place = (self.kernel.arg_names.index("CONTIGUOUS"),)
        return replace(self, constants={**self.constants, place: True})

    def source(self) -> ASTSource:
        """What `triton.compile` takes."""
        return ASTSource(self.kernel, self.signature, self.constants, self.attributes)


@dataclass(frozen=True, slots=True)
class _AbsentDevice:
    """The part of a Triton driver that a launch asks before it compiles."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> GPUTarget:
        # Triton keeps a target per device: two targets must be two devices.
        return self.target

    def get_current_stream(self, _device: GPUTarget) -> int:
        return 0


def record(
    op: str, layer: Layer, target: str, *, block_size: int, dtype: torch.dtype
) -> list[Launch]:
    """Call an op's launcher for a layer on a target; return what it would launch.

    Args:
        op: a name in `OPS`.
        layer: shapes and options of the attention.
        target: a name in `TARGETS`: the GPU that is not there.
        block_size: tokens of a block.
        dtype: of queries and pool.
    """
    launches: list[Launch] = []

    def keep(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        options = json.loads(compile["specialization_data"])["options"]
        launches.append(
            Launch(
                fn.jit_function,
                compile["signature"],
                compile["constants"],
                compile["configs"][0],
                # Lists (of libraries, of types) are the backend's own, the same always.
                {key: each for key, each in options.items() if isinstance(each, int | float | str)},
            )
        )
        return True  # do not compile, do not launch

    driver.set_active(_AbsentDevice(TARGETS[target]))
    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = keep
        OPS[op](layer, target, block_size, dtype)
    return launches


def _absent(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _pool(layer: Layer, block_size: int, dtype: torch.dtype) -> Tensor:
    num_blocks = _NUM_SEQS * _CONTEXT_TOKENS // block_size
    return _absent(
        layer.num_layers,
        2,
        num_blocks,
        block_size,
        layer.num_kv_heads,
        layer.head_dim,
        dtype=dtype,
    )


def _decode(layer: Layer, target: str, block_size: int, dtype: torch.dtype) -> None:
    keys, values = _pool(layer, block_size, dtype)[0]
    group = layer.num_heads // layer.num_kv_heads
    paged_attention(
        _absent(_NUM_SEQS, layer.num_heads, layer.head_dim, dtype=dtype),
        keys,
        values,
        _absent(_NUM_SEQS, _CONTEXT_TOKENS // block_size),
        _absent(_NUM_SEQS),
        scale=layer.head_dim**-0.5,
        sliding_window=layer.sliding_window,
        softcap=layer.softcap,
        num_splits=_NUM_SPLITS,
        tuning=tuning_for(TuningKey(target, layer.head_dim, block_size, group), dtype),
    )


def _prefill(layer: Layer, target: str, block_size: int, dtype: torch.dtype) -> None:
    keys, values = _pool(layer, block_size, dtype)[0]
    group = layer.num_heads // layer.num_kv_heads
    prefill_attention(
        _absent(_NUM_CHUNKS * _CHUNK_TOKENS, layer.num_heads, layer.head_dim, dtype=dtype),
        keys,
        values,
        _absent(_NUM_CHUNKS, _CONTEXT_TOKENS // block_size),
        query_starts=_absent(_NUM_CHUNKS + 1),
        context_lens=_absent(_NUM_CHUNKS),
        scale=layer.head_dim**-0.5,
        sliding_window=layer.sliding_window,
        softcap=layer.softcap,
        max_query_len=_CHUNK_TOKENS,
        tiles=prefill_tiles(target, layer.head_dim, dtype.itemsize, _CHUNK_TOKENS * group),
    )


def _reshape(layer: Layer, _target: str, block_size: int, dtype: torch.dtype) -> None:
    keys, values = _pool(layer, block_size, dtype)[0]
    new = _absent(_CHUNK_TOKENS, layer.num_kv_heads, layer.head_dim, dtype=dtype)
    reshape_and_cache(new, new, keys, values, _absent(_CHUNK_TOKENS, dtype=torch.int64))


def _copy(layer: Layer, _target: str, block_size: int, dtype: torch.dtype) -> None:
    blocks = _absent(_NUM_SEQS, dtype=torch.int64)
    copy_blocks(_pool(layer, block_size, dtype), blocks, blocks)


def _swap(layer: Layer, _target: str, block_size: int, dtype: torch.dtype) -> None:
    blocks = _absent(_NUM_SEQS, dtype=torch.int64)
    pool = _pool(layer, block_size, dtype)
    swap_blocks(pool, pool, blocks, blocks)


OPS: MappingProxyType[str, Callable[[Layer, str, int, torch.dtype], None]] = MappingProxyType(
    {
        "paged_attention": _decode,
        "prefill_attention": _prefill,
        "reshape_and_cache": _reshape,
        "copy_blocks": _copy,
        "swap_blocks": _swap,
    }
)
