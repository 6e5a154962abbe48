"""Contexts scattered over a poisoned pool, and attention over them in float64.

Nothing here is shared with the kernels or with the specification: one query, one head
and one score at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Absolute and relative, of results whose values are drawn from a standard normal: the
# dtype rounds the weights of the softmax once and the result once.
TOLERANCES = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 1.6e-2, "rtol": 1.6e-2},
}

NO_BLOCK = 10**6


class PagedContexts:
    """Random K/V of `lengths` tokens each, in blocks drawn at random from a pool.

    A slot that belongs to no context is NaN, and so is one before `first_positions`;
    table entries past a context name no block. Keys and values lie one behind the other
    block by block, so the stride from block to block is not the size of a block.

    Args:
        lengths: tokens of each sequence; 0 is a padding row.
        num_kv_heads: of the pool.
        head_dim: of the pool.
        block_size: of the pool.
        dtype: of the pool.
        shared_blocks: leading blocks that all sequences share, as far as they are full.
        seed: of the values and of the blocks' order.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        shared_blocks: int = 0,
        seed: int = 0,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(needed) + 2
        order = torch.randperm(num_blocks, generator=random).tolist()
        pool = torch.full((num_blocks, 2, block_size, num_kv_heads, head_dim), torch.nan)
        self.pool = pool.to(dtype)
        self.key_cache, self.value_cache = self.pool[:, 0], self.pool[:, 1]
        self.block_size = block_size
        self.tables = torch.full((len(lengths), max([*needed, 0]) + 1), NO_BLOCK, dtype=torch.int32)
        self.lengths = torch.tensor(list(lengths), dtype=torch.int32)
        common = [order.pop() for _ in range(shared_blocks)]
        for index, length in enumerate(lengths):
            shared = common[: length // block_size]
            blocks = shared + [order.pop() for _ in range(needed[index] - len(shared))]
            self.tables[index, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            for position in range(length):
                block, offset = self.slot(index, position)
                if self.pool[block, 0, offset, 0, 0].isnan():
                    new = torch.randn(2, num_kv_heads, head_dim, generator=random)
                    self.pool[block, :, offset] = new.to(dtype)

    def slot(self, index: int, position: int) -> tuple[int, int]:
        """Return the block and the offset of one token."""
        return int(self.tables[index, position // self.block_size]), position % self.block_size

    def poison_before(self, index: int, position: int) -> None:
        """Make one sequence's tokens before `position` NaN, and name no block of only such."""
        for earlier in range(position):
            block, offset = self.slot(index, earlier)
            self.pool[block, :, offset] = torch.nan
        self.tables[index, : max(position, 0) // self.block_size] = NO_BLOCK

    def attend(
        self,
        index: int,
        query: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attend one sequence's last tokens to its context, causally, in float64.

        Args:
            index: of the sequence.
            query: [num_queries, num_heads, head_dim], the last tokens of the context.
            scale: as for the kernels.
            sliding_window: as for the kernels.
            softcap: as for the kernels.
        Returns: [num_queries, num_heads, head_dim] float64.
        """
        length = int(self.lengths[index])
        group = query.shape[1] // self.pool.shape[3]
        out = torch.zeros(query.shape, dtype=torch.float64)
        if length == 0:
            return out
        slots = [self.slot(index, position) for position in range(length)]
        tokens = torch.stack([self.pool[block, :, offset] for block, offset in slots]).double()
        for place in range(len(query)):
            position = length - len(query) + place
            first = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
            for head in range(query.shape[1]):
                seen = tokens[first : position + 1, :, head // group]
                scores = [scale * float(key @ query[place, head].double()) for key in seen[:, 0]]
                if softcap is not None:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                weights = [math.exp(score - max(scores)) for score in scores]
                for weight, value in zip(weights, seen[:, 1], strict=True):
                    out[place, head] += weight / sum(weights) * value
        return out
