"""The compiled operators, with the signatures and meanings of `reference`.

Each raises ValueError that names the argument which is wrong, and `KernelsUnavailable`
where the kernels cannot be compiled; `plans` is for who calls them once per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_kernels.checks import check_options, check_shape
from octavo_kernels.cpu.plans import WritePlan, plan_decode, plan_prefill


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write new keys and values to their slots.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], the last dimension contiguous.
        value: as key.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], written in place;
            each block contiguous.
        value_cache: as key_cache.
        slot_mapping: [num_tokens] int64, distinct slots; -1: not written.

    Raises:
        ValueError: if shapes, dtypes or strides disagree.
        KernelsUnavailable: if the compiled kernels cannot be had here.
    """
    WritePlan(slot_mapping, key_cache).run(key, value, key_cache, value_cache)


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
) -> Tensor:
    """Attend each sequence's one new token to its cached blocks, where they stand.

    Args: as for `reference.paged_attention`, and
        query: the last dimension contiguous.
        context_lens: 0 makes a row of zeros.
        out: as query, overwritten; None: a new tensor.
    Returns: [num_seqs, num_heads, head_dim] in query's dtype, accumulated in fp32. A row
        is the same to the bit whatever the batch and the number of threads.

    Raises:
        ValueError: if shapes, dtypes or strides disagree.
        KernelsUnavailable: if the compiled kernels cannot be had here.
    Source:  PagedAttention (Kwon et al., 2023), section 4.1; Flash-Decoding (Dao et al.,
        2023).
    """
    check_options(sliding_window=sliding_window, softcap=softcap)
    check_shape("query", query, (None, None, None))
    plan = plan_decode(
        block_tables,
        context_lens,
        key_cache=key_cache,
        num_heads=query.shape[1],
        sliding_window=sliding_window,
    )
    out = torch.empty_like(query) if out is None else out
    plan.run(query, key_cache, value_cache, out, scale=scale, softcap=softcap)
    return out


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
    out: Tensor | None = None,
) -> Tensor:
    """Attend chunks of prompts, causally, to their cached prefix and to themselves.

    Args: as for `reference.prefill_attention`, and
        query: the last dimension contiguous.
        out: as query, overwritten; None: a new tensor.
    Returns: [num_tokens, num_heads, head_dim] in query's dtype, accumulated in fp32. A row
        is the same to the bit however its prompt was cut into chunks.

    Raises:
        ValueError: if shapes, dtypes or strides disagree.
        KernelsUnavailable: if the compiled kernels cannot be had here.
    Source:  FlashAttention-2 (Dao, 2023).
    """
    check_options(sliding_window=sliding_window, softcap=softcap)
    check_shape("query", query, (None, None, None))
    plan = plan_prefill(
        block_tables,
        context_lens,
        query_starts=query_starts,
        key_cache=key_cache,
        num_heads=query.shape[1],
        sliding_window=sliding_window,
    )
    out = torch.empty_like(query) if out is None else out
    plan.run(query, key_cache, value_cache, out, scale=scale, softcap=softcap)
    return out
