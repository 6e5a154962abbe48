"""A buddy allocator over contiguous slots, as Orca's memory is modelled in the paper.

Sizes are rounded up to a power of two. A chunk is split in halves until it has the size that is
asked for; two free halves of one chunk, buddies, are merged. A pool whose size is no power of two
starts as one chunk for each bit of its size, the largest first, so every chunk lies at a multiple
of its size.
"""

from __future__ import annotations

from bisect import insort


class BuddyAllocator:
    """Hands out chunks of slots.

    Invariant: chunks, free and allocated, cover the pool without overlap; no two buddies
    are both free.
    """

    def __init__(self, num_slots: int) -> None:
        """Start with everything free.

        Args:
            num_slots: size of the pool, at least 1.
        """
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        self.num_slots = num_slots
        self.num_allocated = 0
        self._orders: dict[int, int] = {}
        self._free: list[list[int]] = [[] for _ in range(num_slots.bit_length())]
        address = 0
        for order in reversed(range(num_slots.bit_length())):
            if num_slots >> order & 1:
                self._free[order].append(address)
                address += 1 << order

    @property
    def largest_chunk(self) -> int:
        """Slots of the largest chunk that there can ever be."""
        return 1 << (len(self._free) - 1)

    def allocate(self, num_slots: int) -> int | None:
        """Take a chunk of at least so many slots.

        Returns: its address, the lowest of the smallest that do; None if there is none.
        """
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, got {num_slots}")
        order = (num_slots - 1).bit_length()
        found = next((k for k in range(order, len(self._free)) if self._free[k]), None)
        if found is None:
            return None
        address = self._free[found].pop(0)
        for k in reversed(range(order, found)):
            insort(self._free[k], address + (1 << k))
        self._orders[address] = order
        self.num_allocated += 1 << order
        return address

    def free(self, address: int) -> None:
        """Give a chunk back and merge it with its buddies."""
        order = self._orders.pop(address)
        self.num_allocated -= 1 << order
        while order + 1 < len(self._free):
            buddy = address ^ (1 << order)
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            address = min(address, buddy)
            order += 1
        insort(self._free[order], address)

    def chunks(self) -> list[tuple[int, int, bool]]:
        """Every chunk as (address, slots, whether it is allocated), by address."""
        free = [(a, 1 << k, False) for k, chunks in enumerate(self._free) for a in chunks]
        taken = [(a, 1 << k, True) for a, k in self._orders.items()]
        return sorted([*free, *taken])
