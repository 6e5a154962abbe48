"""Chunked prefill over paged K/V: many new tokens of a sequence, causal over its context.

A tile holds `ROWS` rows. A row is one query head at one position, and the heads that share
a KV head are neighbours, so one pass over the keys serves them all:

    row r of a chunk's KV head:  position r // GROUP,  head r % GROUP

Keys come `KEYS` at a time. Of those a tile needs, the ones in the middle are seen by all
of its rows and need no mask; the window's edge before and the diagonal behind do.

    keys of a sequence   0 . . . begin ~~~~ full_begin ======== full_end ~~~~ end . . .
                         (skipped)   (masked)         (unmasked)        (masked)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.checks import (
    check_attention,
    check_contiguous,
    check_device,
    check_dtype,
    check_options,
    check_shape,
)
from octavo_kernels.triton_ops.tuning import arch_of

# Below every score, and finite: the difference of two such is 0, not NaN.
_LOWEST = tl.constexpr(-3.0e38)
_LOG2_E = math.log2(math.e)
_WARP_GROUP_ARCHS = ("sm_90", "sm_100", "sm_103")
_SMALL_TILES = (16, 64)


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How a program is cut: query rows and keys at a time, warps, pipeline stages."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def prefill_tiles(arch: str, head_dim: int, itemsize: int, num_rows: int) -> PrefillTiles:
    """Choose the largest tiles whose state stays in registers.

    A warp group's matrix instructions (sm_90, sm_100) read keys from shared memory and
    let them be many; elsewhere keys pass through registers, beside queries and results.
    Queries fewer than a tile's rows get a smaller tile.

    Args:
        arch: as `arch_of` names it.
        head_dim: elements of a head.
        itemsize: bytes of an element; fp32 is multiplied exactly, in small tiles.
        num_rows: tokens of the longest chunk times query heads of a KV head.
    """
    wide = head_dim > 128
    if itemsize > 2:
        most, keys, num_warps, num_stages = 16, 16 if wide else 32, 8, 2
    elif arch in _WARP_GROUP_ARCHS:
        # A third stage would fetch the table further ahead, for up to 6% more instructions.
        most, keys, num_warps, num_stages = 128, 32 if wide else 64, 8, 2
    else:
        most, keys, num_warps = 64 if wide else 128, 64 if head_dim <= 64 else 32, 8
        num_stages = 3 if arch.startswith("sm_") and not wide else 2
        if wide and not arch.startswith("sm_"):
            keys = 16  # a tile on its way waits in registers here
    rows = next((rows for rows in _SMALL_TILES if num_rows <= rows < most), most)
    if rows < most and not wide and (rows == _SMALL_TILES[0] or arch.startswith("sm_")):
        num_warps = 4
    return PrefillTiles(rows, keys, num_warps, num_stages)


def prefill_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    *,
    query_starts: Tensor,
    context_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    max_query_len: int | None = None,
    out: Tensor | None = None,
    contiguous: bool = False,
    tiles: PrefillTiles | None = None,
) -> Tensor:
    """Attend chunks of prompts, causally, to their cached prefix and to themselves.

    Args:
        query: [num_tokens, num_heads, head_dim], chunk after chunk, in the pool's dtype;
            tokens and heads may lie anywhere, the last dimension is contiguous.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim]; the chunks' own
            K/V are in it already.
        value_cache: as key_cache.
        block_tables: [num_chunks, max_blocks] int32; entries past the context are
            never read.
        query_starts: [num_chunks + 1] int32, where each chunk begins; the last is
            num_tokens.
        context_lens: [num_chunks] int32, prefix and chunk.
        scale: factor on the scores, above 0.
        sliding_window: the latest tokens attended to, the query's own included; None: all.
        softcap: scores become `softcap * tanh(score / softcap)`; None: they stay.
        max_query_len: tokens of the longest chunk, or more; tokens of a chunk past it get
            no result. None: num_tokens, which launches programs that find nothing to do.
        out: [num_tokens, num_heads, head_dim] in query's dtype; None: a new one.
        contiguous: a chunk's blocks follow its first one in order, and the rest of the
            table is not read. For measuring what paging costs.
        tiles: how a program is cut; None: `prefill_tiles` says.

    Returns: [num_tokens, num_heads, head_dim] in query's dtype, accumulated in fp32; zeros
        where a chunk's context is empty.
    Raises:  ValueError: if shapes, dtypes, strides or devices disagree.
    Source:  FlashAttention-2 (Dao, 2023), algorithm 1, over PagedAttention's blocks (Kwon
        et al., 2023); soft-cap: Gemma 2 (2024), section 2.
    """
    check_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        out,
        heads_may_lie_apart=True,
    )
    check_options(sliding_window=sliding_window, softcap=softcap)
    num_chunks = block_tables.shape[0]
    check_shape("query_starts", query_starts, (num_chunks + 1,))
    check_dtype("query_starts", query_starts, torch.int32)
    check_contiguous("query_starts", query_starts)
    check_device("query_starts", query_starts, query.device)
    if not scale > 0:
        raise ValueError(f"scale is {scale}, not above 0")
    num_tokens, num_heads, head_dim = query.shape
    longest = num_tokens if max_query_len is None else min(max_query_len, num_tokens)
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if num_chunks == 0 or longest <= 0:
        return out
    num_kv_heads = key_cache.shape[2]
    num_rows = longest * (num_heads // num_kv_heads)
    if tiles is None:
        arch = arch_of(query.device)
        tiles = prefill_tiles(arch, head_dim, query.element_size(), num_rows)
    _prefill_attention_kernel[(triton.cdiv(num_rows, tiles.rows), num_kv_heads, num_chunks)](
        query,
        key_cache,
        value_cache,
        block_tables,
        query_starts,
        context_lens,
        out,
        # exp(x) is taken as exp2(x * log2(e)).
        (softcap or scale) * _LOG2_E,
        2 * _LOG2_E * scale / softcap if softcap else 0.0,
        sliding_window or 0,
        *query.stride()[:2],
        *out.stride()[:2],
        key_cache.stride(0),
        block_tables.stride(0),
        HEAD_DIM=head_dim,
        GROUP=num_heads // num_kv_heads,
        BLOCK_SIZE=key_cache.shape[1],
        SLOT_STRIDE=key_cache.stride(1),
        WINDOWED=sliding_window is not None,
        CAPPED=softcap is not None,
        CONTIGUOUS=contiguous,
        ROWS=tiles.rows,
        KEYS=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


# What differs from step to step must not make another kernel to compile.
@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["block_tables", "query_starts", "context_lens"],
)
def _prefill_attention_kernel(
    query,
    key_cache,
    value_cache,
    block_tables,
    query_starts,
    context_lens,
    out,
    score_factor,
    cap_factor,
    window,
    query_token_stride,
    query_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    table_stride,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    kv_head = tl.program_id(1)
    chunk = tl.program_id(2)
    first_token = tl.load(query_starts + chunk)
    num_queries = tl.load(query_starts + chunk + 1) - first_token
    context_len = tl.load(context_lens + chunk)
    # The last tile of a chunk sees most keys. It goes first, not to be waited for alone.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    last_row = tl.minimum(first_row + ROWS, num_queries * GROUP) - 1
    if first_row > last_row:
        return

    PADDED_DIM: tl.constexpr = max(16, triton.next_power_of_2(HEAD_DIM))
    dims = tl.arange(0, PADDED_DIM)
    rows = first_row + tl.arange(0, ROWS)
    tokens = first_token.to(tl.int64) + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    inside = (rows <= last_row)[:, None] & (dims < HEAD_DIM)[None, :]
    query_rows = tokens * query_token_stride + heads * query_head_stride
    q = tl.load(query + query_rows[:, None] + dims[None, :], mask=inside, other=0.0)

    prefix = context_len - num_queries
    positions = prefix + rows // GROUP
    first_position = prefix + first_row // GROUP
    begin, full_begin, full_end, end = _key_range(
        first_position, prefix + last_row // GROUP, window, WINDOWED, KEYS
    )

    key_head = key_cache + kv_head * HEAD_DIM
    value_head = value_cache + kv_head * HEAD_DIM
    table = block_tables + chunk.to(tl.int64) * table_stride
    first_block = tl.load(table) if CONTIGUOUS else 0
    highest = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    edges = (begin // KEYS * KEYS, full_begin, full_end, end)
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        highest, total, attended = _attend(
            edges[part], edges[part + 1], begin, end, highest, total, attended, q, positions,
            key_head, value_head, table, first_block, score_factor, cap_factor, window,
            block_stride, HEAD_DIM, BLOCK_SIZE, SLOT_STRIDE, WINDOWED, CAPPED, CONTIGUOUS, KEYS,
            MASKED=part != 1,
        )  # fmt: skip
    attended = attended / tl.where(total > 0, total, 1.0)[:, None]
    out_rows = tokens * out_token_stride + heads * out_head_stride
    tl.store(
        out + out_rows[:, None] + dims[None, :], attended.to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _key_range(first_position, last_position, window, WINDOWED: tl.constexpr, KEYS: tl.constexpr):
    """Say which keys a tile reads, begin .. end, and which of them all of its rows see."""
    begin = 0
    full_begin = 0
    end = last_position + 1
    if WINDOWED:
        begin = tl.maximum(first_position - window + 1, 0)
        full_begin = tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS
    full_end = tl.maximum((first_position + 1) // KEYS * KEYS, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def _attend(
    start,
    stop,
    begin,
    end,
    highest,
    total,
    attended,
    q,
    positions,
    key_head,
    value_head,
    table,
    first_block,
    score_factor,
    cap_factor,
    window,
    block_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys start .. stop into the softmax; of these, read begin .. end.

    `start` is a multiple of KEYS.
    """
    PADDED_DIM: tl.constexpr = max(16, triton.next_power_of_2(HEAD_DIM))
    BLOCKS: tl.constexpr = max(KEYS // BLOCK_SIZE, 1)
    dims = tl.arange(0, PADDED_DIM)
    within_block = tl.arange(0, KEYS) % BLOCK_SIZE * SLOT_STRIDE
    for first in range(start, stop, KEYS):
        keys = first + tl.arange(0, KEYS)
        places = first // BLOCK_SIZE + tl.arange(0, BLOCKS)
        if CONTIGUOUS:
            blocks = first_block + places
        elif MASKED:
            needed = (places * BLOCK_SIZE < end) & ((places + 1) * BLOCK_SIZE > begin)
            blocks = tl.load(table + places, mask=needed, other=0)
        else:
            blocks = tl.load(table + places)
        # One load for each block, spread over its keys.
        blocks = tl.broadcast_to(blocks.to(tl.int64)[:, None], [BLOCKS, KEYS // BLOCKS])
        slots = blocks.reshape(KEYS) * block_stride + within_block
        if KEYS < BLOCK_SIZE:
            slots += first % BLOCK_SIZE * SLOT_STRIDE
        offsets = slots[:, None] + dims[None, :]
        readable = (dims < HEAD_DIM)[None, :]
        if MASKED:
            readable = readable & ((keys >= begin) & (keys < end))[:, None]
        key = tl.load(key_head + offsets, mask=readable, other=0.0)
        value = tl.load(value_head + offsets, mask=readable, other=0.0)

        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        if CAPPED:  # tanh(x) = 1 - 2 / (1 + exp(2x))
            scores = 1 - 2 / (1 + tl.exp2(scores * cap_factor))
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if WINDOWED:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * score_factor)
        weights = tl.exp2(scores * score_factor - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weights, 1)
        attended = attended * fade[:, None]
        attended = tl.dot(weights.to(value.dtype), value, attended, input_precision="ieee")
        highest = higher
    return highest, total, attended
