"""Block tables: allocate on demand, share, copy on write, fence, swap.

The manager changes sequences' tables and the pool together, so that at any time

    ref_count(block) == number of tables that hold it + number of fences that hold it

A **fence** holds the blocks that were given back while a step that may touch them
was still in flight. Steps are acknowledged in order; `settle(step)` lifts all fences
up to that step, and only then can the blocks be handed out again.

Methods come in pairs: a question that changes nothing (`num_to_grow`), and the deed
(`grow`), which may be called only after the question was answered well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

from scheduler_svc.core import prefix_cache
from scheduler_svc.core.block_pool import BlockId, BlockPool
from scheduler_svc.core.sequence import Sequence, SequenceGroup


@dataclass(slots=True)
class Growth:
    """What `grow` did: a block appended, or a shared block replaced by a copy."""

    appended: list[BlockId]
    copied: tuple[int, BlockId, BlockId] | None = None  # logical block, source, copy


class BlockManager:
    """Block tables of all sequences over one device pool and one host pool."""

    def __init__(self, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        """Start with empty pools.

        Args:
            num_blocks: blocks of the device pool.
            block_size: tokens per block.
            num_host_blocks: blocks of the host pool; 0 turns swapping off.
        """
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_host_blocks) if num_host_blocks else None
        self.block_size = block_size
        self._fences: deque[tuple[int, list[BlockId]]] = deque()
        self._host_fences: deque[tuple[int, list[BlockId]]] = deque()
        # Sequences with settled full blocks that have no name yet.
        self.unnamed: list[Sequence] = []

    # -- sizes ---------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def worst_case(self, group: SequenceGroup) -> int:
        """Blocks that the group may come to need at once, all samples at full length."""
        request = group.request
        prompt = len(request.prompt_tokens)
        width = request.beam.width if request.beam else request.best_of
        # Of a prompt that ends at a border, samples that start anew each compute the last
        # block: a sample's last token must be computed to draw the next.
        shared = (prompt if request.beam else prompt - 1) // self.block_size
        # The last token drawn never needs K/V of its own.
        each = self.blocks_for(max(prompt, prompt + request.max_tokens - 1)) - shared
        return shared + width * each

    # -- growing -------------------------------------------------------------------

    def num_to_grow(self, sequences: Iterable[Sequence]) -> int:
        """Blocks needed for each of these sequences to write its next token.

        Holders of one shared block need a copy each, but for the last one, who keeps
        it if no one else holds it.
        """
        needed = 0
        writers: dict[BlockId, int] = {}
        for seq in sequences:
            logical = seq.num_scheduled // self.block_size
            if logical >= len(seq.block_table):
                needed += 1
            else:
                block = seq.block_table[logical]
                if self.pool.ref_counts[block] > 1:
                    writers[block] = writers.get(block, 0) + 1
        for block, count in writers.items():
            needed += min(count, self.pool.ref_counts[block] - 1)
        return needed

    def grow(self, seq: Sequence, num_tokens: int, fence: int | None) -> Growth:
        """Make the table ready for the next `num_tokens` to be written.

        Args:
            seq: sequence whose tokens from num_scheduled on will be written.
            num_tokens: how many, at least 1.
            fence: newest step that may read the source of a copy.
        """
        growth = Growth([])
        table = seq.block_table
        first = seq.num_scheduled // self.block_size
        if first < len(table) and self.pool.ref_counts[table[first]] > 1:
            source, copy = table[first], self.pool.allocate()
            table[first] = copy
            growth.copied = (first, source, copy)
            # While another table holds the source it cannot be reused anyway, and a fence
            # would only make that table's owner copy too.
            tables = self.pool.ref_counts[source] - sum(b == source for b in self.fenced_blocks())
            self.release([source], None if tables > 1 else fence)
        for _ in range(self.blocks_for(seq.num_scheduled + num_tokens) - len(table)):
            block = self.pool.allocate()
            table.append(block)
            growth.appended.append(block)
        return growth

    def grow_by_block(self, seq: Sequence) -> BlockId | None:
        """Append the block that the next token begins; None if it does not begin one.

        It is the part of `grow` that a steady step needs.
        """
        table = seq.block_table
        if seq.num_scheduled < len(table) * self.block_size:
            return None
        block = self.pool.allocate()
        table.append(block)
        return block

    # -- sharing -------------------------------------------------------------------

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Give the child the parent's table; every block is shared."""
        self.adopt(child, parent.block_table)
        child.num_registered = parent.num_registered
        child.block_hashes = parent.block_hashes[: parent.num_registered]

    def adopt(self, seq: Sequence, blocks: Seq[BlockId]) -> None:
        """Share these blocks as the first of an empty table."""
        assert not seq.block_table
        for block in blocks:
            self.pool.share(block)
        seq.block_table = list(blocks)

    def match_prefix(self, seq: Sequence) -> list[BlockId]:
        """Blocks of the prefix cache that hold the start of the sequence.

        The last known token is never part of it: it must be computed to sample.
        """
        self.name_blocks()
        limit = (len(seq.tokens) - 1) // self.block_size
        hits: list[BlockId] = []
        for block_hash in islice(prefix_cache.extend_hashes(seq, limit, self.block_size), limit):
            block = self.pool.lookup(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def num_idle(self, blocks: Iterable[BlockId]) -> int:
        """How many of these blocks nobody references: sharing them uses them up."""
        return sum(self.pool.ref_counts[b] == 0 for b in blocks)

    def name_blocks(self) -> None:
        """Name the settled blocks of all that wait for it.

        Hashing takes most of the time that a full block costs, and nobody waits for a name
        but who looks one up: so it is done when someone does, or in a pause.
        """
        unnamed, self.unnamed = self.unnamed, []
        for seq in unnamed:
            self._register_settled(seq)

    def _register_settled(self, seq: Sequence) -> None:
        """Name the full blocks whose K/V are computed and acknowledged."""
        full = seq.num_computed // self.block_size
        # Without a table it is swapped out: the blocks are named when it is back.
        if full <= seq.num_registered or not seq.block_table:
            return
        hashes = prefix_cache.extend_hashes(seq, full, self.block_size)
        for logical in range(seq.num_registered, full):
            self.pool.register(seq.block_table[logical], hashes[logical])
        seq.num_registered = full

    # -- giving back ---------------------------------------------------------------

    def release(self, blocks: Iterable[BlockId], fence: int | None) -> None:
        """Give references back, once step `fence` is acknowledged (None: now)."""
        if fence is None:
            for block in blocks:
                self.pool.release(block)
        else:
            _fence(self._fences, fence, blocks)

    def free(self, seq: Sequence, fence: int | None) -> None:
        """Give back all that a sequence holds, its tail first (LRU evicts tails first)."""
        if seq.group.uses_cache:
            self._register_settled(seq)
        if seq.block_table:
            self.release(reversed(seq.block_table), fence)
            seq.block_table = []
        if seq.host_table:
            self._release_host(seq.host_table, fence)
            seq.host_table = []

    def settle(self, step_id: int) -> None:
        """Lift the fences of all steps up to `step_id`."""
        while self._fences and self._fences[0][0] <= step_id:
            for block in self._fences.popleft()[1]:
                self.pool.release(block)
        while self._host_fences and self._host_fences[0][0] <= step_id:
            assert self.host_pool is not None
            for block in self._host_fences.popleft()[1]:
                self.host_pool.release(block)

    @property
    def num_fenced(self) -> int:
        """References that wait for a step in flight."""
        return sum(len(blocks) for _, blocks in self._fences)

    def fenced_blocks(self) -> Iterator[BlockId]:
        """Every reference that a fence holds."""
        for _, blocks in self._fences:
            yield from blocks

    def num_becoming_available(self) -> int:
        """Blocks that will be available when all fences are lifted."""
        held: dict[BlockId, int] = {}
        for block in self.fenced_blocks():
            held[block] = held.get(block, 0) + 1
        return sum(self.pool.ref_counts[block] == count for block, count in held.items())

    # -- swapping ------------------------------------------------------------------

    def can_swap_out(self, group: SequenceGroup) -> bool:
        """The host pool has room for every block of the group."""
        blocks = {b for seq in group.live for b in seq.block_table}
        return self.host_pool is not None and len(blocks) <= self.host_pool.num_available

    def swap_out(self, group: SequenceGroup, fence: int) -> tuple[list[BlockId], list[BlockId]]:
        """Move the group's tables to the host; sharing inside the group is kept.

        Returns: device blocks and the host blocks they go to, parallel.
        """
        assert self.host_pool is not None
        moved: dict[BlockId, BlockId] = {}
        for seq in group.live:
            for block in seq.block_table:
                if block in moved:
                    self.host_pool.share(moved[block])
                else:
                    moved[block] = self.host_pool.allocate()
            seq.host_table = [moved[block] for block in seq.block_table]
            self.release(reversed(seq.block_table), fence)
            seq.block_table = []
        return list(moved), list(moved.values())

    def num_to_swap_in(self, group: SequenceGroup) -> int:
        """Device blocks that the group needs to come back."""
        return len({b for seq in group.live for b in seq.host_table})

    def swap_in(self, group: SequenceGroup, fence: int) -> tuple[list[BlockId], list[BlockId]]:
        """Move the group's tables back to the device.

        Returns: host blocks and the device blocks they go to, parallel.
        """
        moved: dict[BlockId, BlockId] = {}
        for seq in group.live:
            for block in seq.host_table:
                if block in moved:
                    self.pool.share(moved[block])
                else:
                    moved[block] = self.pool.allocate()
            seq.block_table = [moved[block] for block in seq.host_table]
            self._release_host(seq.host_table, fence)
            seq.host_table = []
        return list(moved), list(moved.values())

    def _release_host(self, blocks: list[BlockId], fence: int | None) -> None:
        assert self.host_pool is not None
        if fence is None:
            for block in blocks:
                self.host_pool.release(block)
        else:
            _fence(self._host_fences, fence, blocks)

    # -- invariants ----------------------------------------------------------------

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that references equal holders, on the device and on the host."""
        sequences = list(sequences)
        tables = [b for seq in sequences for b in seq.block_table]
        self.pool.check([*tables, *self.fenced_blocks()])
        if self.host_pool is not None:
            host = [b for seq in sequences for b in seq.host_table]
            self.host_pool.check([*host, *(b for _, f in self._host_fences for b in f)])


def _fence(
    fences: deque[tuple[int, list[BlockId]]], step_id: int, blocks: Iterable[BlockId]
) -> None:
    """Add blocks to the fence of a step; fences stay in the order of steps.

    A plan under construction may have fenced blocks by itself already, when others are
    given back that only the steps before it touch.
    """
    place = len(fences)
    while place and fences[place - 1][0] > step_id:
        place -= 1
    if place and fences[place - 1][0] == step_id:
        fences[place - 1][1].extend(blocks)
    else:
        fences.insert(place, (step_id, list(blocks)))
