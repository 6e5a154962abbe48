"""Machine code as a list of instructions, whatever the vendor, and its loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, as one thread sees it.

    `target` is the index of the instruction that a branch goes to. `load_bits` and
    `store_bits` are the width of an access to global memory, 0 if it is none;
    `spill_bytes` is what a store to the stack writes.
    """

    opcode: str
    target: int | None = None
    load_bits: int = 0
    store_bits: int = 0
    spill_bytes: int = 0
    is_matrix: bool = False
    is_float: bool = False


@dataclass(frozen=True)
class Listing:
    """The instructions of one kernel, or of one loop in it."""

    instructions: Sequence[Instruction]

    def __len__(self) -> int:
        return len(self.instructions)

    @cached_property
    def loaded_bytes(self) -> int:
        """Bytes that a thread loads from global memory in one pass."""
        return sum(each.load_bits for each in self.instructions) // 8

    @cached_property
    def load_bits(self) -> int:
        """The narrowest loads among those that matter; 0 if nothing is loaded.

        Keys are half of the bytes and values are the other; tables, slots and lengths
        take a few beside them. So a width matters that carries two fifths.
        """
        return _width(each.load_bits for each in self.instructions)

    @cached_property
    def store_bits(self) -> int:
        """As `load_bits`, of stores."""
        return _width(each.store_bits for each in self.instructions)

    @cached_property
    def spill_bytes(self) -> int:
        """Bytes that a thread stores to its stack."""
        return sum(each.spill_bytes for each in self.instructions)

    @property
    def num_matrix(self) -> int:
        """How many instructions use the matrix units."""
        return sum(each.is_matrix for each in self.instructions)

    def innermost_loops(self) -> list[Listing]:
        """The loops that contain no other: code from a branch's target to the branch."""
        spans = {
            (each.target, index)
            for index, each in enumerate(self.instructions)
            if each.target is not None and each.target < index
        }
        inner = [
            (first, last)
            for first, last in spans
            if not any(
                (start, end) != (first, last) and first <= start and end <= last
                for start, end in spans
            )
        ]
        return [Listing(self.instructions[first : last + 1]) for first, last in sorted(inner)]

    def main_loop(self) -> Listing | None:
        """The loop that a long context spends its time in, or None.

        That is an innermost loop that loads and calculates. Where a kernel has one for
        whole tiles and one with masks, it is the one with fewer instructions a byte.
        """
        loops = [
            loop
            for loop in self.innermost_loops()
            if loop.loaded_bytes and any(e.is_matrix or e.is_float for e in loop.instructions)
        ]
        with_matrix = [loop for loop in loops if loop.num_matrix]
        return min(
            with_matrix or loops, key=lambda loop: len(loop) / loop.loaded_bytes, default=None
        )


def _width(widths: Iterable[int]) -> int:
    carried = Counter[int]()
    for width in widths:
        carried[width] += width
    total = carried.total()
    return min((width for width in carried if width and 5 * carried[width] >= 2 * total), default=0)
