"""Decode: one new token per sequence attends to that sequence's blocks.

Each program takes one split of one sequence's context and the query heads that share
one KV head, so that K/V are read once per group. It keeps an online softmax (Milakov
& Gimelshein, 2018) over tiles of whole blocks; with more than one split a second
kernel merges their results (flash-decoding, Dao et al., 2023).

Inside a tile every load is 128 bits wide and costs one 64-bit multiply-add: the
blocks' places come from one load of the table per block, and what a thread adds to
them for its row within the block is the same in every tile.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.checks import check_attention, check_options, check_shape
from octavo_kernels.triton_ops.splits import MAX_SPLITS, Scratch, choose_num_splits
from octavo_kernels.triton_ops.tuning import Tuning, TuningKey, arch_of, tuning_for


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
    max_context_len: int | None = None,
    num_splits: int | None = None,
    scratch: Scratch | None = None,
    contiguous: bool = False,
    tuning: Tuning | None = None,
) -> Tensor:
    """Attend each sequence's one new token to its cached blocks.

    Args:
        query: [num_seqs, num_heads, head_dim], fp16/bf16/fp32; each row contiguous.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim] in query's dtype;
            num_heads is a multiple of num_kv_heads, each block contiguous.
        value_cache: as key_cache.
        block_tables: [num_seqs, max_blocks] int32; entries past the context are
            never read.
        context_lens: [num_seqs] int32, the new token included; 0 makes a row zeros.
        scale: factor on the scores.
        sliding_window: the latest tokens attended to, the new one included; None: all.
        softcap: scores become `softcap * tanh(score / softcap)`; None: they stay.
        out: as query, where the result goes; None: a new tensor.
        max_context_len: upper bound of context_lens; None: what the tables can hold.
        num_splits: parts of each context; None: `choose_num_splits` says.
        scratch: memory for the splits' results; None: allocated for this call.
        contiguous: a sequence's blocks follow its first one in order, and the rest of
            the table is not read. For measuring what paging costs.
        tuning: how the kernel is laid out; None: the table says.
    Returns: [num_seqs, num_heads, head_dim] in query's dtype, accumulated in fp32.
    Raises:  ValueError: if shapes, dtypes, strides or devices disagree.
    Source:  PagedAttention (Kwon et al., 2023), section 4.1; soft-cap: Gemma 2
        (2024), section 2.
    """
    check_attention(query, key_cache, value_cache, block_tables, context_lens, out)
    check_shape("block_tables", block_tables, (len(query), None))
    check_options(sliding_window=sliding_window, softcap=softcap)
    _check_sizes(num_splits, max_context_len)
    num_seqs, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = num_heads // num_kv_heads
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if num_seqs == 0:
        return out
    if num_splits is None:
        longest = max_context_len or block_tables.shape[1] * block_size
        longest = min(longest, sliding_window or longest)
        processors = _num_processors(query.device)
        num_splits = choose_num_splits(num_seqs, num_kv_heads, longest, processors)
    if tuning is None:
        key = TuningKey(arch_of(query.device), head_dim, block_size, group)
        tuning = tuning_for(key, query.dtype)
    results, weights = out, None
    if num_splits > 1:
        scratch = scratch or Scratch(query.device)
        results, weights = scratch.take(num_seqs, num_heads, num_splits, head_dim)
    attend_split[(num_kv_heads, num_seqs, num_splits)](
        results,
        weights,
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        scale,
        results.stride(0),
        query.stride(0),
        key_cache.stride(0) // 8,
        block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=_padded(group),
        HEAD_DIM=head_dim,
        DIM=_padded(head_dim),
        BLOCK_SIZE=block_size,
        KEYS=tuning.tile_tokens,
        WINDOW=sliding_window,
        SOFTCAP=softcap,
        CONTIGUOUS=contiguous,
        PRECISION=_precision(query.dtype),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    if weights is not None:
        _merge(out, results, weights)
    return out


def _merge(out: Tensor, results: Tensor, weights: Tensor) -> None:
    num_seqs, num_heads, num_splits, head_dim = results.shape
    merge_splits[(num_heads, num_seqs)](
        out,
        results,
        weights,
        num_splits,
        out.stride(0),
        HEAD_DIM=head_dim,
        DIM=_padded(head_dim),
        SPLITS=triton.next_power_of_2(num_splits),
        num_warps=4,
    )


def _check_sizes(num_splits: int | None, max_context_len: int | None) -> None:
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {num_splits}, not 1 to {MAX_SPLITS}")
    if max_context_len is not None and max_context_len < 1:
        raise ValueError(f"max_context_len is {max_context_len}, not at least 1")


def _padded(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))  # what tl.dot takes


def _precision(dtype: torch.dtype) -> str:
    # NVIDIA's tensor cores have no fp32: three products of tf32 are as good.
    return "tf32x3" if dtype == torch.float32 and torch.version.hip is None else "ieee"


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit(do_not_specialize=["table_stride"])
def attend_split(
    results,  # [num_seqs, num_heads, num_splits, HEAD_DIM]
    weights,  # [num_seqs, num_heads, num_splits], log2 of each split's sum; None: one split
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    scale,
    result_stride,
    query_stride,
    block_stride,  # in units of 8 elements, so that a block's place is a 32-bit product
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, padded for tl.dot
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,  # HEAD_DIM, padded to a power of two
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,  # tokens of a tile: whole blocks, or an equal part of one
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend one group of query heads to one split of one sequence's context."""
    # Heads vary fastest: programs that run side by side read neighbouring memory.
    kv_head, split, num_splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    seq = tl.program_id(1).to(tl.int64)
    first_block, low, high = _attended_tokens(tl.load(context_lens + seq), BLOCK_SIZE, WINDOW)
    low_tile, high_tile = low // KEYS, tl.cdiv(high, KEYS)
    tiles_per_split = tl.cdiv(high_tile - low_tile, num_splits)
    first = low_tile + split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, high_tile)
    # The last tile is masked, and under a window the first; those between are whole.
    first_masked, first_whole = tl.maximum(first, high_tile - 1), first
    if WINDOW is not None:
        first_masked = tl.where(split == 0, low_tile, first_masked)
        first_whole = tl.maximum(first, low_tile + 1)

    rows, dims, tokens = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, KEYS)
    heads = kv_head * GROUP + rows
    real = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(
        query + seq * query_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0
    )
    within_block = (tokens % BLOCK_SIZE * NUM_KV_HEADS + kv_head) * HEAD_DIM
    keys = key_cache + (within_block[:, None] + dims[None, :])
    values = value_cache + (within_block[:, None] + dims[None, :])
    table = block_tables + seq * table_stride + first_block

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    largest, total, sums = _attend_tiles(
        first_masked, last, tl.maximum(high_tile - 1 - low_tile, 1), low, high,
        largest, total, sums, queries, scale, keys, values, table, block_stride,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, SOFTCAP, CONTIGUOUS, PRECISION, MASKED=True,
    )  # fmt: skip
    largest, total, sums = _attend_tiles(
        first_whole, tl.minimum(last, high_tile - 1), 1, low, high,
        largest, total, sums, queries, scale, keys, values, table, block_stride,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, SOFTCAP, CONTIGUOUS, PRECISION, MASKED=False,
    )  # fmt: skip

    attended = sums / tl.where(total > 0, total, 1.0)[:, None]
    places = heads * num_splits + split
    results += seq * result_stride + places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(results, attended, mask=real)
    if weights is not None:
        weights += seq * NUM_KV_HEADS * GROUP * num_splits + places
        tl.store(weights, largest + tl.log2(total), mask=rows < GROUP)


@triton.jit
def _attended_tokens(context_len, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """Say in which block the window begins, and which tokens it has, counted from there."""
    start = 0
    if WINDOW is not None:
        start = tl.maximum(context_len - WINDOW, 0)
    first_block = start // BLOCK_SIZE
    return first_block, start - first_block * BLOCK_SIZE, context_len - first_block * BLOCK_SIZE


@triton.jit
def _attend_tiles(
    first,
    last,
    step,
    low,  # the first token to attend to, and the first after the last, from the first block on
    high,
    largest,  # [ROWS] of the scores so far, which are in units of log2(e)
    total,  # [ROWS] of 2^(score - largest)
    sums,  # [ROWS, DIM] of the values, weighted so
    query,  # [ROWS, DIM]
    scale,
    keys,  # [TILE, DIM] places of a tile whose blocks all were block 0
    values,
    table,
    block_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Carry the online softmax over every `step`th tile from `first` to `last`."""
    TILE: tl.constexpr = keys.shape[0]
    DIM: tl.constexpr = keys.shape[1]
    real = (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    for tile in tl.range(first, last, step, num_stages=1 if MASKED else None):
        tokens = tile * TILE + tl.arange(0, TILE)
        seen = (tokens >= low) & (tokens < high)
        starts = _block_starts(
            tile, high, table, block_stride, NUM_KV_HEADS * HEAD_DIM, TILE, BLOCK_SIZE, CONTIGUOUS,
            MASKED,
        )  # fmt: skip
        # That rows are contiguous and aligned is hidden from the compiler by the reshape.
        tile_keys = tl.max_contiguous(tl.multiple_of(keys + starts[:, None], [1, 16]), [1, 8])
        tile_values = tl.max_contiguous(tl.multiple_of(values + starts[:, None], [1, 16]), [1, 8])
        if MASKED:
            key = tl.load(tile_keys, mask=seen[:, None] & real, other=0.0)
            value = tl.load(tile_values, mask=seen[:, None] & real, other=0.0)
        elif HEAD_DIM < DIM:
            key = tl.load(tile_keys, mask=real, other=0.0)
            value = tl.load(tile_values, mask=real, other=0.0)
        else:
            key = tl.load(tile_keys)
            value = tl.load(tile_values)

        scores = _scores(query, key, scale, SOFTCAP, PRECISION)
        if MASKED:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(
            weights.to(value.dtype), value, sums * shrink[:, None], input_precision=PRECISION
        )
        largest = new_largest
    return largest, total, sums


@triton.jit
def _block_starts(
    tile,
    high,
    table,
    block_stride,
    TOKEN_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Look up where each token's block begins, or the tile's part of it: [TILE] elements."""
    BLOCKS: tl.constexpr = max(TILE // BLOCK_SIZE, 1)
    blocks = tile * TILE // BLOCK_SIZE + tl.arange(0, BLOCKS)
    if CONTIGUOUS:
        blocks += tl.load(table)
    elif MASKED:
        blocks = tl.load(table + blocks, mask=blocks * BLOCK_SIZE < high, other=0)
    else:
        blocks = tl.load(table + blocks)
    eighths = blocks * block_stride
    if TILE < BLOCK_SIZE:
        eighths += tile * TILE % BLOCK_SIZE * (TOKEN_STRIDE // 8)
    starts = eighths.to(tl.int64) * 8
    return tl.broadcast_to(starts[:, None], [BLOCKS, TILE // BLOCKS]).reshape([TILE])


@triton.jit
def _scores(query, key, scale, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Score each key for each query head, in units of log2(e): [ROWS, TILE]."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    scores = tl.dot(query, key.T, input_precision=PRECISION)
    if SOFTCAP is None:
        scores *= scale * LOG2_E
    else:  # tanh(x) = 1 - 2 / (e^2x + 1)
        growth = tl.exp2(scores * (scale * (2 * LOG2_E / SOFTCAP)))
        scores = SOFTCAP * LOG2_E - (2 * SOFTCAP * LOG2_E) / (growth + 1)
    return scores


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(
    out,
    results,  # [num_seqs, num_heads, num_splits, HEAD_DIM]
    weights,  # [num_seqs, num_heads, num_splits]
    num_splits,
    out_stride,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,  # num_splits, padded to a power of two
):
    """Weigh the splits of one query head by what each holds of the softmax's sum."""
    head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = seq * tl.num_programs(0) + head
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, DIM)
    real = dims < HEAD_DIM
    logs = tl.load(
        weights + row * num_splits + splits, mask=splits < num_splits, other=float("-inf")
    )
    largest = tl.max(logs, 0)
    # Splits without a token weigh nothing; a row of context 0 has no others.
    shares = tl.where(logs > float("-inf"), tl.exp2(logs - largest), 0.0)
    total = tl.sum(shares, 0)
    attended = tl.load(
        results + (row * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :],
        mask=(splits < num_splits)[:, None] & real[None, :],
        other=0.0,
    )
    merged = tl.sum(attended * shares[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + seq * out_stride + head * HEAD_DIM + dims, merged, mask=real)
