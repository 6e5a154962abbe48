"""New keys and values, written to their slots in one launch.

A program writes one token's keys and values, all heads of them or a part. In the pool
they lie side by side; in the source the heads may lie apart, as they do in a transposed
view of [heads, tokens, head_dim], and are read where they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.checks import (
    check_contiguous,
    check_device,
    check_dtype,
    check_pool,
    check_shape,
)

_ELEMENTS_PER_WARP = 512  # 64 lanes of 128 bits
_MAX_ELEMENTS = 2048


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write new keys and values to their slots.

    Args:
        key: [num_tokens, num_kv_heads, head_dim] in the pool's dtype; tokens and heads
            may lie anywhere, the last dimension is contiguous.
        value: as key, with strides of its own.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], written in place;
            contiguous in all but its first dimension.
        value_cache: as key_cache.
        slot_mapping: [num_tokens] int64, distinct slots; of a token whose slot is below
            zero nothing is written.

    Raises:
        ValueError: if shapes, dtypes, strides or devices disagree.
    """
    check_pool(key_cache, value_cache)
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    check_shape("key", key, (None, num_kv_heads, head_dim))
    check_shape("value", value, key.shape)
    for name, tensor in (("key", key), ("value", value)):
        check_dtype(name, tensor, key_cache.dtype)
        check_device(name, tensor, key_cache.device)
        check_contiguous(name, tensor, from_dim=2)
    check_shape("slot_mapping", slot_mapping, key.shape[:1])
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_device("slot_mapping", slot_mapping, key_cache.device)
    check_contiguous("slot_mapping", slot_mapping)
    if key.shape[0] == 0:
        return
    token_elements = num_kv_heads * head_dim
    elements = triton.next_power_of_2(token_elements)
    elements = min(max(elements, _ELEMENTS_PER_WARP), _MAX_ELEMENTS)
    _reshape_and_cache_kernel[(key.shape[0], triton.cdiv(token_elements, elements))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        value_cache.stride(0),
        BLOCK_SIZE=block_size,
        TOKEN_ELEMENTS=token_elements,
        HEAD_DIM=head_dim,
        ELEMENTS=elements,
        num_warps=elements // _ELEMENTS_PER_WARP,
    )


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _reshape_and_cache_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    key_stride_block,
    value_stride_block,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_ELEMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    elements = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    heads = (elements // HEAD_DIM).to(tl.int64)
    dims = elements % HEAD_DIM
    inside = elements < TOKEN_ELEMENTS
    in_block = (slot % BLOCK_SIZE) * TOKEN_ELEMENTS + elements
    source = key + token * key_stride_token + heads * key_stride_head + dims
    new = tl.load(source, mask=inside)
    tl.store(key_cache + block * key_stride_block + in_block, new, mask=inside)
    source = value + token * value_stride_token + heads * value_stride_head + dims
    new = tl.load(source, mask=inside)
    tl.store(value_cache + block * value_stride_block + in_block, new, mask=inside)
