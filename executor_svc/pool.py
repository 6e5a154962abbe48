"""The KV pool: every byte of K/V, allocated once, moved by whole blocks.

One tensor holds all layers, so that the copies of a step are one operation
however deep the model is; each layer's keys and values are views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from octavo_kernels import reference
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's K/V look like, over all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers, keys and values."""
        values = 2 * self.num_layers * block_size * self.num_kv_heads * self.head_dim
        return values * self.dtype.itemsize


class KvPool:
    """Device and host blocks of one executor.

    `keys[layer]` and `values[layer]` are [num_blocks, block_size, num_kv_heads,
    head_dim] views of `device_blocks`, which is [num_layers, 2, num_blocks,
    block_size, num_kv_heads, head_dim]. Slots that nobody wrote hold anything,
    NaN included: a reader must not look past a sequence's context.
    """

    def __init__(
        self,
        shape: KvShape,
        *,
        block_size: int,
        num_device_blocks: int,
        num_host_blocks: int,
        device: torch.device,
    ) -> None:
        def allocate(num_blocks: int, where: torch.device, *, pinned: bool) -> torch.Tensor:
            return torch.empty(
                (shape.num_layers, 2, num_blocks, block_size, shape.num_kv_heads, shape.head_dim),
                dtype=shape.dtype,
                device=where,
                pin_memory=pinned,
            )

        self.shape = shape
        self.block_size = block_size
        self.device_blocks = allocate(num_device_blocks, device, pinned=False)
        self.host_blocks = allocate(
            num_host_blocks,
            torch.device("cpu"),
            pinned=device.type == "cuda" and num_host_blocks > 0,
        )
        self._ops = _block_ops(device)
        self.keys = [self.device_blocks[layer, 0] for layer in range(shape.num_layers)]
        self.values = [self.device_blocks[layer, 1] for layer in range(shape.num_layers)]

    def copy(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy device blocks to device blocks, all layers at once."""
        self._ops.copy(self.device_blocks, self._on_device(sources), self._on_device(destinations))

    def swap_out(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy device blocks to host blocks."""
        self._ops.swap(
            self.device_blocks,
            self.host_blocks,
            self._on_device(device_blocks),
            self._on_host(host_blocks),
        )

    def swap_in(self, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
        """Copy host blocks to device blocks."""
        self._ops.swap(
            self.host_blocks,
            self.device_blocks,
            self._on_host(host_blocks),
            self._on_device(device_blocks),
        )

    def _on_host(self, blocks: Sequence[int]) -> Tensor:
        # From pageable memory a copy to the device would wait for all before it.
        pinned = self.device_blocks.device.type == "cuda"
        return torch.tensor(blocks, dtype=torch.int64, pin_memory=pinned)

    def _on_device(self, blocks: Sequence[int]) -> Tensor:
        return self._on_host(blocks).to(self.device_blocks.device, non_blocking=True)


class _BlockOps(NamedTuple):
    copy: Callable[[Tensor, Tensor, Tensor], None]
    swap: Callable[[Tensor, Tensor, Tensor, Tensor], None]


def _block_ops(device: torch.device) -> _BlockOps:
    """How blocks are moved: where there is Triton for the device, without waiting for it."""
    in_torch = _BlockOps(reference.copy_blocks, reference.swap_blocks)
    if device.type != "cuda":
        return in_torch
    try:
        from octavo_kernels.triton_ops.copy_blocks import copy_blocks
        from octavo_kernels.triton_ops.swap_blocks import swap_blocks
    except ImportError:
        return in_torch
    return _BlockOps(copy_blocks, swap_blocks)
