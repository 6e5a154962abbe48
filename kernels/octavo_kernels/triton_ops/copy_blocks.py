"""All copies of blocks that a step asks for, over all layers, in one launch.

To a copy the pool is words of 32 bits, whatever its dtype: four of them make the 128 bits
that a thread moves at a time. A program moves a part of one block of one layer's keys or
values; how many there are is the grid's affair, so 1 copy and 1,000 are one launch.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.checks import check_contiguous, check_device, check_dtype, check_shape

_MAX_WORDS = 2048
_WORDS_PER_WARP = 512


def copy_blocks(pool: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy blocks within a pool over all layers, all of them at once.

    Args:
        pool: [num_layers, 2, num_blocks, ...] of any dtype, written in place; a block of
            one layer's keys or values is contiguous.
        sources: [num_copies] int64.
        destinations: [num_copies] int64, distinct; none is also a source.

    Raises:
        ValueError: if shapes, dtypes, strides or devices disagree, or a block is not
            whole words of 32 bits.
    """
    check_block_ids("sources", sources, pool.device)
    check_block_ids("destinations", destinations, pool.device)
    check_shape("destinations", destinations, sources.shape)
    words = block_words("pool", pool)
    move_blocks(words, words, sources, destinations)


def check_block_ids(name: str, blocks: Tensor, device: torch.device) -> None:
    """Require a list of block ids on `device`.

    Raises:
        ValueError: if it is of another shape, dtype or device.
    """
    check_shape(name, blocks, (None,))
    check_dtype(name, blocks, torch.int64)
    check_contiguous(name, blocks)
    check_device(name, blocks, device)


def block_words(name: str, pool: Tensor) -> Tensor:
    """View a pool as [num_layers, 2, num_blocks, num_words] of 32 bits.

    Args:
        name: of the argument that the pool came as.
        pool: [num_layers, 2, num_blocks, ...].

    Raises:
        ValueError: if a block of one layer's keys or values is not contiguous, or not
            whole words.
    """
    if pool.dim() < 4 or pool.shape[1] != 2:
        raise ValueError(f"{name} {tuple(pool.shape)} is not of shape (any, 2, any, ...)")
    check_contiguous(name, pool, from_dim=3)
    blocks = pool.flatten(3)
    offsets = (pool.storage_offset(), *pool.stride()[:3], blocks.shape[3])
    if any(offset * pool.element_size() % 4 for offset in offsets):
        raise ValueError(f"{name} has blocks that are not whole words of 4 bytes")
    return blocks.view(torch.int32)


def move_blocks(
    source_words: Tensor, destination_words: Tensor, sources: Tensor, destinations: Tensor
) -> None:
    """Launch the copy of blocks; each tensor is one that the current device can address.

    Args:
        source_words: from `block_words`.
        destination_words: from `block_words`, of as many layers and words a block.
        sources: [num_copies] int64.
        destinations: [num_copies] int64.
    """
    num_layers, _, _, num_words = source_words.shape
    num_copies = sources.shape[0]
    if num_copies == 0 or num_layers * num_words == 0:
        return
    tile = min(triton.next_power_of_2(num_words), _MAX_WORDS)
    _copy_blocks_kernel[(num_copies, triton.cdiv(num_words, tile), num_layers)](
        source_words,
        destination_words,
        sources,
        destinations,
        *source_words.stride()[:3],
        *destination_words.stride()[:3],
        NUM_WORDS=num_words,
        TILE=tile,
        num_warps=math.ceil(tile / _WORDS_PER_WARP),
    )


@triton.jit(do_not_specialize_on_alignment=["sources", "destinations"])
def _copy_blocks_kernel(
    source_words,
    destination_words,
    sources,
    destinations,
    source_stride_layer,
    source_stride_kind,
    source_stride_block,
    destination_stride_layer,
    destination_stride_kind,
    destination_stride_block,
    NUM_WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    copy = tl.program_id(0)
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    layer = tl.program_id(2).to(tl.int64)
    inside = words < NUM_WORDS
    source = source_words + layer * source_stride_layer + words
    source += tl.load(sources + copy) * source_stride_block
    destination = destination_words + layer * destination_stride_layer + words
    destination += tl.load(destinations + copy) * destination_stride_block
    keys = tl.load(source, mask=inside)
    values = tl.load(source + source_stride_kind, mask=inside)
    tl.store(destination, keys, mask=inside)
    tl.store(destination + destination_stride_kind, values, mask=inside)
