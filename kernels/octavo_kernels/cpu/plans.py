"""Attention laid out once per step, to be run once per layer.

What depends on tables and lengths only (who works on what, scratch, pointers) is the
same in every layer, so it is made once; a run then costs some microseconds of Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo_kernels.checks import check_contiguous, check_dtype, check_options, check_shape
from octavo_kernels.cpu.library import AttentionArguments, WritesArguments, library

Ints = npt.NDArray[np.int32]

_LONGEST = 2**31 - 1

DTYPES = (torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
_HEAD_DIM_STEP = 16

_SPLIT_TOKENS = 256
"""A decode item's positions at most. Not a function of the load: splits decide how sums
are rounded, and a sequence's result must not depend on what runs beside it."""
_TILE_ROWS = 192
"""Rows of a prefill item, queries times heads of a group; packing K/V is shared by them."""
_ITEMS_PER_THREAD = 8
_LEAST_PARALLEL_BYTES = 1 << 16
"""Less K/V than this is read sooner than a second thread wakes."""


def why_unsupported(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot serve such a pool, or None if they can."""
    if dtype not in DTYPES:
        return f"the pool is {dtype}, neither bfloat16 nor float32"
    if not 0 < head_dim <= MAX_HEAD_DIM or head_dim % _HEAD_DIM_STEP:
        return f"head_dim {head_dim} is not a multiple of {_HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
    return None


class WritePlan:
    """Where one step's new keys and values go, in every layer of a pool.

    `slots` is the mapping. For one thread at a time.
    """

    def __init__(self, slot_mapping: Tensor, key_cache: Tensor) -> None:
        """Lay the writes out.

        Args:
            slot_mapping: [num_tokens] int64, distinct slots; -1: not written.
            key_cache: [num_blocks, block_size, num_kv_heads, head_dim], any layer's.

        Raises:
            ValueError: if an argument is out of shape or dtype; it is named.
            KernelsUnavailable: if the compiled kernels cannot be had here.
        """
        check_shape("key_cache", key_cache, (None, None, None, None))
        check_shape("slot_mapping", slot_mapping, (None,))
        check_dtype("slot_mapping", slot_mapping, torch.int64)
        check_contiguous("slot_mapping", slot_mapping)
        _, block_size, num_kv_heads, head_dim = key_cache.shape
        self.slots = slot_mapping
        self._shape = (len(slot_mapping), num_kv_heads, head_dim)
        self._cache_shape, self._dtype = key_cache.shape, key_cache.dtype
        self._arguments = WritesArguments(
            slots=slot_mapping.data_ptr(),
            num_tokens=len(slot_mapping),
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            element_bytes=key_cache.element_size(),
            num_threads=torch.get_num_threads(),
        )
        self._write = library().octavo_reshape_and_cache

    def run(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
        """Write one layer's keys and values.

        Args:
            key: [num_tokens, num_kv_heads, head_dim], the last dimension contiguous.
            value: as key.
            key_cache: of the planned shape, written in place; each block contiguous.
            value_cache: as key_cache.

        Raises:
            ValueError: if a tensor is not as planned.
        """
        _, num_kv_heads, head_dim = self._shape
        for name, source, cache, write in (
            ("key", key, key_cache, self._arguments.keys),
            ("value", value, value_cache, self._arguments.values),
        ):
            _check_planned(name, source, self._shape, self._dtype)
            _check_planned(f"{name}_cache", cache, self._cache_shape, self._dtype)
            write.token_stride, write.head_stride, last = source.stride()
            write.block_stride, *strides = cache.stride()
            if last != 1 and head_dim > 1:
                raise ValueError(f"{name} is not contiguous in the last dimension")
            if strides != [num_kv_heads * head_dim, head_dim, 1]:
                raise ValueError(f"{name}_cache is not contiguous within a block")
            write.source, write.cache = source.data_ptr(), cache.data_ptr()
        self._write(self._arguments)


@dataclass(slots=True)
class AttentionPlan:
    """One step's attention, decode or prefill, over pools of one shape.

    Invariant: `arguments` point into `kept`, which lives as long as they do. For one
    thread at a time.
    """

    function: Callable[[AttentionArguments], int]
    arguments: AttentionArguments
    query_shape: tuple[int, int, int]
    cache_shape: torch.Size
    dtype: torch.dtype
    kept: list[Any] = field(default_factory=list)

    def run(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        out: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> None:
        """Attend one layer's queries to its pool, into `out`.

        Args:
            query: [num_tokens, num_heads, head_dim] in the pool's dtype; the last
                dimension contiguous.
            key_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the planned
                shape, each block contiguous.
            value_cache: as key_cache.
            out: as query.
            scale: factor on the scores.
            softcap: scores become `softcap * tanh(score / softcap)`; None: they stay.

        Raises:
            ValueError: if a tensor is not as planned.
            MemoryError: if there is none for the threads' scratch.
        """
        if not self.query_shape[0]:
            return
        call = self.arguments
        strides, out_strides = query.stride(), out.stride()
        key_strides, value_strides = key_cache.stride(), value_cache.stride()
        _check_planned("query", query, self.query_shape, self.dtype)
        _check_planned("out", out, self.query_shape, self.dtype)
        _check_planned("key_cache", key_cache, self.cache_shape, self.dtype)
        _check_planned("value_cache", value_cache, self.cache_shape, self.dtype)
        if strides[2] != 1 or out_strides[2] != 1:
            raise ValueError("query and out must be contiguous in the last dimension")
        row = self.cache_shape[2] * self.cache_shape[3]
        for name, (_, *inner) in (("key_cache", key_strides), ("value_cache", value_strides)):
            if inner != [row, self.cache_shape[3], 1]:
                raise ValueError(f"{name} is not contiguous within a block")
        call.query, call.out = query.data_ptr(), out.data_ptr()
        call.keys, call.values = key_cache.data_ptr(), value_cache.data_ptr()
        call.query_token_stride, call.query_head_stride = strides[:2]
        call.out_token_stride, call.out_head_stride = out_strides[:2]
        call.key_block_stride, call.value_block_stride = key_strides[0], value_strides[0]
        call.scale, call.softcap = scale, softcap or 0.0
        if self.function(call):
            raise MemoryError("no memory for the scratch of attention")


Plans = tuple[AttentionPlan, AttentionPlan]
"""A step's decodes and its chunks."""


def plan_decode(
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    key_cache: Tensor,
    num_heads: int,
    sliding_window: int | None = None,
) -> AttentionPlan:
    """Lay out a step's decodes: one query token per sequence.

    Args:
        block_tables: [num_seqs, max_blocks] int32; entries past the context are never
            read.
        context_lens: [num_seqs] int; 0 makes a row of zeros.
        key_cache: any layer's.
        num_heads: of the query.
        sliding_window: the latest tokens attended to; None: all.

    Raises:
        ValueError: if an argument is out of shape, bounds or dtype; it is named.
        KernelsUnavailable: if the compiled kernels cannot be had here.
    """
    call, lengths = _arguments(block_tables, context_lens, key_cache, num_heads, sliding_window)
    query_shape = (len(lengths), num_heads, call.head_dim)
    plan = AttentionPlan(
        library().octavo_decode, call, query_shape, key_cache.shape, key_cache.dtype
    )
    _keep(plan, block_tables, context_lens=lengths)
    begins = np.maximum(lengths - sliding_window, 0) if sliding_window else np.zeros_like(lengths)
    counts = np.maximum(-(-(lengths - begins) // _SPLIT_TOKENS), 1)
    first_items = np.cumsum(counts) - counts
    sequences = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    shared = np.where(counts > 1, counts, 0)
    first_partial = np.concatenate([[0], np.cumsum(shared)]).astype(np.int32)
    place = np.arange(len(sequences)) - first_items[sequences]
    items = np.empty((len(sequences), 4), np.int32)
    items[:, 0] = sequences
    items[:, 1] = begins[sequences] + place * _SPLIT_TOKENS
    items[:, 2] = np.minimum(lengths[sequences], items[:, 1] + _SPLIT_TOKENS)
    items[:, 3] = np.where(shared[sequences] > 0, first_partial[sequences] + place, -1)
    # The largest first: whoever is last then finishes soonest.
    items = items[np.argsort(items[:, 1] - items[:, 2], kind="stable")]

    token_bytes = 2 * call.num_kv_heads * call.head_dim * key_cache.element_size()
    if int((lengths - begins).sum()) * token_bytes < _LEAST_PARALLEL_BYTES:
        call.num_threads = 1
    plenty = len(items) >= _ITEMS_PER_THREAD * call.num_threads or call.num_threads == 1
    call.num_items, call.num_parts = len(items), 1 if plenty else call.num_kv_heads
    row_floats = -(-call.head_dim // 32) * 32 + 2
    partials = np.empty((int(first_partial[-1]), num_heads, row_floats), np.float32)
    pending = (shared * call.num_parts).astype(np.int32)
    _keep(plan, items=items, first_partial=first_partial, partials=partials, pending=pending)
    return plan


def plan_prefill(
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    query_starts: Tensor,
    key_cache: Tensor,
    num_heads: int,
    sliding_window: int | None = None,
) -> AttentionPlan:
    """Lay out a step's chunks.

    Args:
        block_tables: [num_chunks, max_blocks] int32.
        context_lens: [num_chunks] int, prefix and chunk.
        query_starts: [num_chunks + 1] int, where each chunk begins.
        key_cache: any layer's.
        num_heads: of the query.
        sliding_window: as for `plan_decode`.

    Raises:
        ValueError: if an argument is out of shape, bounds or dtype; it is named.
        KernelsUnavailable: if the compiled kernels cannot be had here.
    """
    call, lengths = _arguments(block_tables, context_lens, key_cache, num_heads, sliding_window)
    check_shape("query_starts", query_starts, (len(lengths) + 1,))
    check_dtype("query_starts", query_starts, torch.int32, torch.int64)
    starts = query_starts.numpy()
    num_queries = np.diff(starts)
    if starts[0] or (num_queries < 0).any() or (num_queries > lengths).any():
        raise ValueError(
            f"query_starts {starts.tolist()} do not fit context_lens {lengths.tolist()}"
        )
    query_shape = (int(starts[-1]), num_heads, call.head_dim)
    plan = AttentionPlan(
        library().octavo_prefill, call, query_shape, key_cache.shape, key_cache.dtype
    )
    _keep(plan, block_tables, context_lens=lengths)
    group = num_heads // call.num_kv_heads
    tile = max(1, _TILE_ROWS // group)
    enough = -(-_ITEMS_PER_THREAD * call.num_threads // call.num_kv_heads)
    while tile > 16 and int((-(-num_queries // tile)).sum()) < enough:
        tile //= 2
    counts = -(-num_queries // tile)
    chunks = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    place = np.arange(len(chunks)) - (np.cumsum(counts) - counts)[chunks]
    items = np.stack([chunks, place * tile], axis=1).astype(np.int32)
    here = np.minimum(num_queries[chunks] - items[:, 1], tile)
    ends = lengths[chunks] - num_queries[chunks] + items[:, 1] + here
    seen = np.minimum(ends, sliding_window + here) if sliding_window else ends
    items = items[np.argsort(-here * seen, kind="stable")]
    call.num_items, call.tile_queries = len(items), tile
    _keep(plan, items=items, query_starts=starts.astype(np.int32))
    return plan


def _arguments(
    block_tables: Tensor,
    context_lens: Tensor,
    key_cache: Tensor,
    num_heads: int,
    sliding_window: int | None,
) -> tuple[AttentionArguments, Ints]:
    """What decode and prefill have in common, and the lengths."""
    check_shape("key_cache", key_cache, (None, None, None, None))
    check_dtype("key_cache", key_cache, *DTYPES)
    check_shape("block_tables", block_tables, (None, None))
    check_dtype("block_tables", block_tables, torch.int32)
    check_contiguous("block_tables", block_tables, from_dim=1)
    check_shape("context_lens", context_lens, block_tables.shape[:1])
    check_options(sliding_window=sliding_window, softcap=None)
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    if reason := why_unsupported(head_dim, key_cache.dtype):
        raise ValueError(f"key_cache: {reason}")
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads {num_heads} do not share {num_kv_heads} KV heads")
    check_dtype("context_lens", context_lens, torch.int32, torch.int64)
    lengths = context_lens.numpy()
    room = block_tables.shape[1] * block_size
    if (lengths < 0).any() or (lengths > room).any():
        raise ValueError(f"context_lens are not all in [0, {room}], the room of block_tables")
    call = AttentionArguments(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        is_bf16=key_cache.dtype == torch.bfloat16,
        num_threads=torch.get_num_threads(),
        sliding_window=min(sliding_window or 0, _LONGEST),
        tables=block_tables.data_ptr(),
        table_stride=block_tables.stride(0),
    )
    return call, lengths.astype(np.int32)


def _keep(plan: AttentionPlan, *tensors: Tensor, **arrays: npt.NDArray[Any]) -> None:
    """Hold on to what the arguments point to; arrays are pointed to by their names."""
    plan.kept += tensors
    for name, array in arrays.items():
        kept = np.ascontiguousarray(array)
        setattr(plan.arguments, name, kept.ctypes.data)
        plan.kept.append(kept)


def _check_planned(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_cpu:
        raise ValueError(
            f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device} is not "
            f"{tuple(shape)} {dtype} on a CPU"
        )
