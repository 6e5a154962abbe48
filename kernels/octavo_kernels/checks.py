"""What every launcher asks of its arguments, before a kernel reads past one of them.

Each check raises ValueError and names the argument. None of them waits for a device:
they look at shapes, dtypes, strides and devices, never at a tensor's values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

POOL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCK_SIZES = (8, 16, 32, 64, 128)
MAX_HEAD_DIM = 256
# A block's place in units of 8 elements is a 32-bit number in the kernels.
MAX_POOL_ELEMENTS = 8 * 2**31


def check_shape(name: str, tensor: Tensor, shape: Sequence[int | None]) -> None:
    """Require `tensor` to be of `shape`; None stands for any size.

    Raises:
        ValueError: if a dimension is missing, left over or of another size.
    """
    fits = tensor.dim() == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} {tuple(tensor.shape)} is not of shape ({wanted})")


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Require `tensor` to be of one of `dtypes`.

    Raises:
        ValueError: if it is of another.
    """
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, not {' or '.join(map(str, dtypes))}")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Require `tensor` to be on `device`.

    Raises:
        ValueError: if it is on another.
    """
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, not on {device}")


def check_contiguous(name: str, tensor: Tensor, from_dim: int = 0) -> None:
    """Require dimensions `from_dim` and up to lie in memory without gaps, in order.

    A tensor without elements does, whatever its strides.

    Raises:
        ValueError: if they do not.
    """
    if not tensor.numel():
        return
    expected = 1
    for dim in range(tensor.dim() - 1, from_dim - 1, -1):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != expected:
            raise ValueError(
                f"{name} with strides {tensor.stride()} is not contiguous from dimension {from_dim}"
            )
        expected *= tensor.shape[dim]


def check_pool(key_cache: Tensor, value_cache: Tensor) -> None:
    """Require one layer's keys and values: two views of one pool.

    Args:
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim] of a dtype in
            `POOL_DTYPES`, block_size in `BLOCK_SIZES`, head_dim a multiple of 8 up to
            `MAX_HEAD_DIM`; each block contiguous, aligned to 16 bytes and a multiple of
            8 elements from the next; from the first to the last at most 2^34 elements.
        value_cache: as key_cache, of its shape, dtype, device and block stride.

    Raises:
        ValueError: if one of them is not so.
    """
    check_shape("key_cache", key_cache, (None, None, None, None))
    check_dtype("key_cache", key_cache, *POOL_DTYPES)
    _, block_size, _, head_dim = key_cache.shape
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"key_cache has blocks of {block_size} tokens, not {BLOCK_SIZES}")
    if not 8 <= head_dim <= MAX_HEAD_DIM or head_dim % 8:
        raise ValueError(
            f"key_cache has a head_dim of {head_dim}, not a multiple of 8 up to {MAX_HEAD_DIM}"
        )
    check_shape("value_cache", value_cache, key_cache.shape)
    check_dtype("value_cache", value_cache, key_cache.dtype)
    check_device("value_cache", value_cache, key_cache.device)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_contiguous(name, cache, from_dim=1)
        if cache.data_ptr() % 16 or cache.stride(0) % 8:
            raise ValueError(f"{name} has blocks that are not aligned to 16 bytes")
        if cache.shape[0] * cache.stride(0) > MAX_POOL_ELEMENTS:
            raise ValueError(f"{name} spans more than {MAX_POOL_ELEMENTS} elements")
    if value_cache.stride(0) != key_cache.stride(0):
        raise ValueError(
            f"value_cache has a block stride of {value_cache.stride(0)}, "
            f"key_cache one of {key_cache.stride(0)}"
        )


def check_attention(  # noqa: PLR0917 - in the order of the ops themselves
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    out: Tensor | None = None,
    *,
    heads_may_lie_apart: bool = False,
) -> None:
    """Require queries, a pool and tables that belong together.

    Args:
        query: [num_queries, num_heads, head_dim] in the pool's dtype, num_heads a
            multiple of num_kv_heads; the last two dimensions contiguous.
        key_cache: as for `check_pool`.
        value_cache: as for `check_pool`.
        block_tables: [num_seqs, max_blocks] int32, the last dimension contiguous.
        context_lens: [num_seqs] int32, contiguous.
        out: as query, of its shape and dtype; None: not given.
        heads_may_lie_apart: of query and out the last dimension only need be contiguous.

    Raises:
        ValueError: if one of them is not so, or they are not all on one device.
    """
    check_pool(key_cache, value_cache)
    _, _, num_kv_heads, head_dim = key_cache.shape
    check_shape("query", query, (None, None, head_dim))
    if query.shape[1] == 0 or query.shape[1] % num_kv_heads:
        raise ValueError(f"query has {query.shape[1]} heads, which do not share {num_kv_heads}")
    check_shape("block_tables", block_tables, (None, None))
    check_shape("context_lens", context_lens, block_tables.shape[:1])
    check_dtype("query", query, key_cache.dtype)
    check_dtype("block_tables", block_tables, torch.int32)
    check_dtype("context_lens", context_lens, torch.int32)
    row_dims = 2 if heads_may_lie_apart else 1
    check_contiguous("query", query, from_dim=row_dims)
    check_contiguous("block_tables", block_tables, from_dim=1)
    check_contiguous("context_lens", context_lens)
    tensors = {"query": query, "block_tables": block_tables, "context_lens": context_lens}
    if out is not None:
        check_shape("out", out, query.shape)
        check_dtype("out", out, query.dtype)
        check_contiguous("out", out, from_dim=row_dims)
        tensors["out"] = out
    for name, tensor in tensors.items():
        check_device(name, tensor, key_cache.device)


def check_options(*, sliding_window: int | None, softcap: float | None) -> None:
    """Require a window of at least one token and a soft-cap above zero, where given.

    Raises:
        ValueError: if one of them is not so.
    """
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}, not at least 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, not above 0")
