"""Blocks moved between the device's pool and the host's, by the device itself.

The host's pool is pinned, so the device addresses it as its own memory: the kernel that
copies blocks reads or writes them there, 128 bits a thread, over the bus. A block lies
scattered over layers, two pieces a layer of it, so copy engines would need a call for
each piece, or a staging buffer on both sides and the host to scatter from it once the
stream has come that far. This way a swap of any size is one launch in stream order, waits
for nothing and needs no memory but its block ids.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

from octavo_kernels import reference
from octavo_kernels.checks import check_dtype, check_shape
from octavo_kernels.triton_ops.copy_blocks import block_words, check_block_ids, move_blocks

_CPU = torch.device("cpu")


def swap_blocks(
    source_pool: Tensor, destination_pool: Tensor, sources: Tensor, destinations: Tensor
) -> None:
    """Gather blocks of one pool and scatter them into another, on the current stream.

    Nothing waits: before the host looks at what came, or writes where it was read, the
    stream must have been synchronized. Where both pools are on a CPU, `reference` serves
    (in Triton's interpreter, the kernel).

    Args:
        source_pool: [num_layers, 2, num_blocks, ...]; on a GPU, or pinned on the host.
        destination_pool: as source_pool, with its own num_blocks; written in place.
        sources: [num_copies] int64 on the source's device.
        destinations: [num_copies] int64 on the destination's device, distinct.

    Raises:
        ValueError: if shapes, dtypes, strides or devices disagree, a host pool beside a
            GPU is not pinned, or a block is not whole words of 32 bits.
    """
    check_block_ids("sources", sources, source_pool.device)
    check_block_ids("destinations", destinations, destination_pool.device)
    check_shape("destinations", destinations, sources.shape)
    check_dtype("destination_pool", destination_pool, source_pool.dtype)
    source_words = block_words("source_pool", source_pool)
    destination_words = block_words("destination_pool", destination_pool)
    num_layers, _, _, num_words = source_words.shape
    check_shape("destination_pool", destination_words, (num_layers, 2, None, num_words))
    devices = {source_pool.device, destination_pool.device}
    if devices == {_CPU} and not knobs.runtime.interpret:
        reference.swap_blocks(source_pool, destination_pool, sources, destinations)
        return
    gpus = devices - {_CPU}
    if len(gpus) > 1:
        raise ValueError(f"destination_pool is on {destination_pool.device}, not on the host")
    for device in gpus:
        _check_addressable("source_pool", source_pool)
        _check_addressable("destination_pool", destination_pool)
        sources, destinations = _ids_on(device, sources), _ids_on(device, destinations)
    move_blocks(source_words, destination_words, sources, destinations)


def _check_addressable(name: str, pool: Tensor) -> None:
    if pool.device == _CPU and not pool.is_pinned():
        raise ValueError(f"{name} is on the host and not pinned: the device cannot address it")


def _ids_on(device: torch.device, blocks: Tensor) -> Tensor:
    # From pageable memory the copy would wait for the stream.
    if blocks.device == _CPU:
        return blocks.pin_memory().to(device, non_blocking=True)
    return blocks
