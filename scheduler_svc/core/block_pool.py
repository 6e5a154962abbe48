"""The physical blocks: who is free, who is cached, how often each is referenced.

A block is in exactly one of three places:

    free ──allocate──> referenced ──release──> cached (its content has a hash)
      ^                    │  ^                  │  │
      └──────release───────┘  └───share (a hit)──┘  │
      ^                                             │
      └───────────── evicted by allocate ───────────┘

so free + cached + referenced == total at all times. Cached blocks are an ordinary
LRU: `allocate` takes blocks without content first and then the one that was
released longest ago. The order lives in an OrderedDict, because a hit takes a block
out of the middle and a plain dict or deque would pay for that by scanning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NewType, cast

BlockId = NewType("BlockId", int)


class BlockPool:
    """Reference counts over `num_blocks` physical blocks.

    Invariant: a block has a reference count of 0 exactly if it is free or cached,
    and every entry of the hash index points to a block with that hash.
    """

    def __init__(self, num_blocks: int) -> None:
        """Start with every block free.

        Args:
            num_blocks: size of the executor's pool, in blocks.
        """
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_total = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free = [cast(BlockId, i) for i in range(num_blocks - 1, -1, -1)]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, BlockId] = {}

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody references and whose content may be hit again."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def num_referenced(self) -> int:
        """Blocks that somebody references."""
        return self.num_total - self.num_available

    def allocate(self) -> BlockId:
        """Take a block with a reference count of 1, evicting a cached one if need be."""
        if self._free:
            block = self._free.pop()
        else:
            assert self._cached, "allocate without an available block"
            block, _ = self._cached.popitem(last=False)
            self._forget_hash(block)
        self.ref_counts[block] = 1
        return block

    def share(self, block: BlockId) -> None:
        """Add a reference; a cached block comes back to life."""
        if self.ref_counts[block] == 0:
            del self._cached[block]
        self.ref_counts[block] += 1

    def release(self, block: BlockId) -> None:
        """Drop a reference; the last one makes the block cached or free."""
        count = self.ref_counts[block] - 1
        assert count >= 0, f"block {block} released more often than referenced"
        self.ref_counts[block] = count
        if count == 0:
            if self._hashes[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def lookup(self, block_hash: bytes) -> BlockId | None:
        """Return the block that holds this content, if any does."""
        return self._by_hash.get(block_hash)

    def register(self, block: BlockId, block_hash: bytes) -> None:
        """Name a referenced block's content.

        Where another block already holds the same content, that one stays the hit and
        this block remains without a name.
        """
        assert self.ref_counts[block] > 0, f"block {block} registered while unreferenced"
        if self._hashes[block] is None and block_hash not in self._by_hash:
            self._hashes[block] = block_hash
            self._by_hash[block_hash] = block

    def is_cached(self, block: BlockId) -> bool:
        """Say whether nobody references the block and its content is known."""
        return block in self._cached

    def check(self, holders: Iterable[BlockId]) -> None:
        """Assert the pool's invariants.

        Args:
            holders: every reference that exists, a block once per holder.
        """
        expected = [0] * self.num_total
        for block in holders:
            expected[block] += 1
        assert expected == self.ref_counts, "reference counts differ from the holders"
        idle = {*self._free, *self._cached}
        assert len(idle) == self.num_available, "a block is free twice, or free and cached"
        assert idle == {b for b, n in enumerate(self.ref_counts) if n == 0}
        assert all(self._hashes[b] is None for b in self._free), "a free block has a name"
        assert all(self._hashes[b] is not None for b in self._cached)
        for block_hash, block in self._by_hash.items():
            assert self._hashes[block] == block_hash

    def _forget_hash(self, block: BlockId) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None
