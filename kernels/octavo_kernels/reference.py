"""The specification of every kernel, in plain torch.

Slow kernels are checked against these functions; on a CPU they also serve. A pool's
slots that were never written may hold anything, NaN included, so nothing here reads
a slot past a sequence's context: padding is pointed at a slot inside it and masked.

Words: a slot is `block * block_size + offset`; a context is the tokens of one
sequence whose K/V stand in the pool, this step's own among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octavo_kernels.checks import check_shape

_MIN_BUCKET_TOKENS = 128


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write new keys and values to their slots.

    Args:
        key: [num_tokens, num_kv_heads, head_dim].
        value: as key.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], written in place;
            contiguous from block to block.
        value_cache: as key_cache.
        slot_mapping: [num_tokens] int64, distinct slots.

    Raises:
        ValueError: if shapes or dtypes disagree.
    """
    if key.shape != value.shape or key.shape[1:] != key_cache.shape[2:]:
        raise ValueError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)} and cache "
            f"{tuple(key_cache.shape)} disagree"
        )
    if slot_mapping.shape != key.shape[:1]:
        raise ValueError(f"slot_mapping {tuple(slot_mapping.shape)} is not one slot per token")
    if key.dtype != key_cache.dtype or value.dtype != value_cache.dtype:
        raise ValueError(f"dtype {key.dtype} is not the cache's {key_cache.dtype}")
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)


def copy_blocks(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy blocks within a pool over all layers, all of them at once.

    Args:
        pool: [num_layers, 2, num_blocks, ...], written in place.
        sources: [num_copies] int64.
        destinations: [num_copies] int64, distinct; none is also a source.

    Raises:
        ValueError: if sources and destinations differ in length.
    """
    swap_blocks(pool, pool, sources, destinations)


def swap_blocks(
    source_pool: Tensor, destination_pool: Tensor, sources: Tensor, destinations: Tensor
) -> None:
    """Gather blocks of one pool and scatter them into another, on another device or not.

    Args:
        source_pool: [num_layers, 2, num_blocks, ...].
        destination_pool: as source_pool, with its own num_blocks; written in place.
        sources: [num_copies] int64 on the source's device.
        destinations: [num_copies] int64 on the destination's device, distinct.

    Raises:
        ValueError: if sources and destinations differ in length.
    """
    if sources.shape != destinations.shape:
        raise ValueError(f"{len(sources)} sources for {len(destinations)} destinations")
    blocks = source_pool.index_select(2, sources)
    destination_pool.index_copy_(2, destinations, blocks.to(destination_pool.device))


@dataclass(frozen=True, slots=True)
class ContextBucket:
    """Sequences of similar context length, padded to the longest of them.

    `members` [n] are places in the batch; `slots` [n, longest] the slots to read;
    `bias` [n, 1, 1, longest] is 0 inside each context and -inf on padding, or None
    if there is no padding.
    """

    members: Tensor
    slots: Tensor
    bias: Tensor | None


def bucket_contexts(
    block_tables: Tensor,
    context_lens: Sequence[int],
    *,
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None = None,
) -> list[ContextBucket]:
    """Group sequences by length and say which slots each one reads.

    The lengths within a bucket differ by less than a factor of two above a floor, so
    padding is bounded whatever mixture of sequences runs. The result holds for every
    layer of a step.

    Args:
        block_tables: [num_seqs, max_blocks] int32 or int64; entries past the context
            are never used.
        context_lens: tokens of each sequence, at least 1.
        block_size: tokens of a block.
        dtype: of the bias, the query's.
        sliding_window: how many of the latest tokens are attended to; None: all.
    """
    device = block_tables.device
    by_size: dict[int, list[int]] = {}
    spans = [min(length, sliding_window or length) for length in context_lens]
    for place, span in enumerate(spans):
        by_size.setdefault(max(span, _MIN_BUCKET_TOKENS).bit_length(), []).append(place)
    buckets = []
    for places in by_size.values():
        longest = max(spans[place] for place in places)
        members = torch.tensor(places, device=device)
        lengths = torch.tensor([context_lens[place] for place in places], device=device)
        sizes = torch.tensor([spans[place] for place in places], device=device)
        offsets = torch.arange(longest, device=device)
        inside = offsets < sizes[:, None]
        # Padding reads the newest token again: always written, and always in the window.
        positions = (lengths - sizes)[:, None] + torch.minimum(offsets, sizes[:, None] - 1)
        blocks = block_tables[members[:, None], positions // block_size].long()
        bias = None
        if min(spans[place] for place in places) != longest:
            bias = torch.zeros(inside.shape, dtype=dtype, device=device)
            bias = bias.masked_fill_(~inside, -torch.inf)[:, None, None, :]
        slots = blocks * block_size + positions % block_size
        buckets.append(ContextBucket(members, slots, bias))
    return buckets


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
) -> Tensor:
    """Attend each sequence's one new token to its cached blocks.

    Args:
        query: [num_seqs, num_heads, head_dim].
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim]; num_heads is a
            multiple of num_kv_heads.
        value_cache: as key_cache.
        block_tables: [num_seqs, max_blocks] int32; entries past the context are
            never read.
        context_lens: [num_seqs] int, the new token included.
        scale: factor on the scores.
        sliding_window: the latest tokens attended to, the new one included; None: all.
        softcap: scores become `softcap * tanh(score / softcap)`; None: they stay.
    Returns: [num_seqs, num_heads, head_dim] in query's dtype.
    Raises:  ValueError: if shapes disagree.
    Source:  PagedAttention (Kwon et al., 2023), section 4.1; soft-cap: Gemma 2
        (2024), section 2.
    """
    _check_attention(query, key_cache, value_cache, block_tables, len(query))
    buckets = bucket_contexts(
        block_tables,
        context_lens.tolist(),
        block_size=key_cache.shape[1],
        dtype=query.dtype,
        sliding_window=sliding_window,
    )
    out = torch.empty_like(query)
    attend_buckets(query, key_cache, value_cache, buckets, scale=scale, softcap=softcap, out=out)
    return out


def attend_buckets(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    buckets: Sequence[ContextBucket],
    *,
    scale: float,
    softcap: float | None,
    out: Tensor,
) -> None:
    """`paged_attention` over buckets that were made before, into `out`."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    for bucket in buckets:
        num_seqs, longest = bucket.slots.shape
        flat = bucket.slots.flatten()
        shape = (num_seqs, longest, num_kv_heads, head_dim)
        # The query heads that share a KV head take the place of query positions.
        grouped = query[bucket.members].reshape(num_seqs, num_kv_heads, -1, head_dim)
        attended = _attend(
            grouped,
            keys.index_select(0, flat).view(shape).transpose(1, 2),
            values.index_select(0, flat).view(shape).transpose(1, 2),
            bias=bucket.bias,
            scale=scale,
            softcap=softcap,
        )
        out[bucket.members] = attended.reshape(num_seqs, num_heads, head_dim)


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
) -> Tensor:
    """Attend chunks of prompts, causally, to their cached prefix and to themselves.

    Args:
        query: [num_tokens, num_heads, head_dim], chunk after chunk.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim]; the chunks' own
            K/V are in it already.
        value_cache: as key_cache.
        block_tables: [num_chunks, max_blocks] int32; entries past the context are
            never read.
        query_starts: [num_chunks + 1] int, where each chunk begins; the last is
            num_tokens.
        context_lens: [num_chunks] int, prefix and chunk.
        scale: as for `paged_attention`.
        sliding_window: as for `paged_attention`.
        softcap: as for `paged_attention`.
    Returns: [num_tokens, num_heads, head_dim] in query's dtype.
    Raises:  ValueError: if shapes disagree.
    """
    _check_attention(query, key_cache, value_cache, block_tables, len(context_lens))
    if query_starts.shape[0] != len(context_lens) + 1 or int(query_starts[-1]) != len(query):
        raise ValueError(f"query_starts {query_starts.tolist()} do not divide {len(query)} tokens")
    out = torch.empty_like(query)
    starts = query_starts.tolist()
    for index, context_len in enumerate(context_lens.tolist()):
        chunk = slice(starts[index], starts[index + 1])
        attend_chunk(
            query[chunk],
            key_cache,
            value_cache,
            chunk_context(
                block_tables[index],
                chunk.stop - chunk.start,
                context_len,
                block_size=key_cache.shape[1],
                dtype=query.dtype,
                sliding_window=sliding_window,
            ),
            scale=scale,
            softcap=softcap,
            out=out[chunk],
        )
    return out


@dataclass(frozen=True, slots=True)
class ChunkContext:
    """What one chunk reads: `slots` [length], and `bias` [num_queries, length].

    The bias is 0 where a query may look and -inf where not.
    """

    slots: Tensor
    bias: Tensor


def chunk_context(
    block_table: Tensor,
    num_queries: int,
    context_len: int,
    *,
    block_size: int,
    dtype: torch.dtype,
    sliding_window: int | None = None,
) -> ChunkContext:
    """Say which slots a chunk reads and which of them each query may see.

    The result holds for every layer of a step.

    Args:
        block_table: [max_blocks] int32 or int64.
        num_queries: tokens of the chunk, the last ones of the context.
        context_len: tokens of prefix and chunk.
        block_size: tokens of a block.
        dtype: of the bias, the query's.
        sliding_window: as for `paged_attention`.
    """
    device = block_table.device
    first = 0
    if sliding_window is not None:
        first = max(0, context_len - num_queries + 1 - sliding_window)
    positions = torch.arange(first, context_len, device=device)
    slots = block_table[positions // block_size].long() * block_size + positions % block_size
    queries = torch.arange(context_len - num_queries, context_len, device=device)[:, None]
    hidden = positions > queries
    if sliding_window is not None:
        hidden |= positions <= queries - sliding_window
    bias = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return ChunkContext(slots, bias.masked_fill_(hidden, -torch.inf))


def attend_chunk(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context: ChunkContext,
    *,
    scale: float,
    softcap: float | None,
    out: Tensor,
) -> None:
    """`prefill_attention` of one chunk whose context was laid out before, into `out`."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    # [num_kv_heads, group, positions, head_dim]: the heads of a group share one K/V.
    grouped = query.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = key_cache.flatten(0, 1).index_select(0, context.slots).transpose(0, 1)[:, None]
    values = value_cache.flatten(0, 1).index_select(0, context.slots).transpose(0, 1)[:, None]
    attended = _attend(
        grouped,
        keys.expand(-1, group, -1, -1),
        values.expand(-1, group, -1, -1),
        bias=context.bias,
        scale=scale,
        softcap=softcap,
    )
    out.copy_(attended.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    return torch.matmul(torch.softmax(scores, dim=-1), value.float()).to(query.dtype)


def _check_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, num_seqs: int
) -> None:
    check_shape("key_cache", key_cache, (None, None, None, None))
    _, _, num_kv_heads, head_dim = key_cache.shape
    check_shape("value_cache", value_cache, key_cache.shape)
    check_shape("query", query, (None, None, head_dim))
    if query.shape[1] % num_kv_heads:
        raise ValueError(f"query has {query.shape[1]} heads, which do not share {num_kv_heads}")
    check_shape("block_tables", block_tables, (num_seqs, None))
