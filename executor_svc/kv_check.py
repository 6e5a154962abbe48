"""The sanitizer: knows what stands in every slot, and stops a step that reads another's.

A slot's tag is a hash of a lineage and all tokens up to the slot's position, which is
what its K/V are a function of. So equal prefixes of one lineage have equal tags, and may
share blocks however they came by them; everything else has another tag. Tags move with
the blocks. A move is never wrong by itself: what counts is what a row then reads.

Nothing here looks at K/V, so a step is checked before the model runs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from executor_svc.batch import StepBatch
from executor_svc.errors import KvCheckFailed
from executor_svc.mixing import mix
from executor_svc.plan import Plan
from executor_svc.rows import Limits, RowTable

Ints = npt.NDArray[np.int64]
Tags = npt.NDArray[np.uint64]

# The rest is for the report only: who wrote the slot, and when.
_SLOT = np.dtype(
    [
        ("tag", np.uint64),  # 0: never written
        ("lineage", np.uint64),
        ("step_id", np.uint64),
        ("row", np.int32),
        ("position", np.int32),
    ]
)
# Set in every tag, so that none is 0.
_WRITTEN = np.uint64(1)


class KvCheck:
    """Shadows of the device and the host pool, and the tags that each row expects.

    Invariant: of a live row, chains[row, :num_chained[row]] belong to its first known
    tokens. A chain is a sum of one hash per (position, token) on top of the lineage's, so
    that a chunk of any length is one cumulative sum. It finds faults, not forgers.
    """

    def __init__(self, limits: Limits) -> None:
        self._block_size = limits.block_size
        self._device = np.zeros((limits.num_device_blocks, limits.block_size), _SLOT)
        self._host = np.zeros((limits.num_host_blocks, limits.block_size), _SLOT)
        # As the row table's arrays: backed with memory only as rows use them.
        self._chains = np.zeros((limits.max_num_rows, limits.max_model_len + 1), np.uint64)
        self._num_chained = np.zeros(limits.max_num_rows, np.int64)

    def reset(self) -> None:
        """Forget every slot: a new owner knows of none, and may read none."""
        self._device["tag"] = 0
        self._host["tag"] = 0

    def check(self, plan: Plan, rows: RowTable, batch: StepBatch) -> None:
        """Follow one step: moves, then all its writes, then all its reads.

        Args:
            plan: the step.
            rows: the rows after the plan's deltas and forks.
            batch: the tokens that the step computes.

        Raises:
            KvCheckFailed: if a row would read a slot that does not hold its own prefix;
                the message names both owners. The tags mean nothing until `reset`.
        """
        self._num_chained[[start.row for start in plan.starts]] = 0
        self._copy_chains(plan.child_parents, plan.child_rows)
        self._move(plan)
        if batch.num_tokens:
            self._extend_chains(rows, batch)
            self._write(plan.step_id, rows, batch)
            self._read(rows, batch)
        self._copy_chains(plan.fork_parents, plan.fork_rows)

    def _copy_chains(self, parents: npt.ArrayLike, children: npt.ArrayLike) -> None:
        """A child knows its parent's tokens; all parents are read, then all written."""
        sources, targets = np.asarray(parents, np.int64), np.asarray(children, np.int64)
        length = int(self._num_chained[sources].max(initial=0))
        self._chains[targets, :length] = self._chains[sources, :length]
        self._num_chained[targets] = self._num_chained[sources]

    def _move(self, plan: Plan) -> None:
        device, host = self._device, self._host
        if plan.swap_out_device_blocks:
            host[list(plan.swap_out_host_blocks)] = device[list(plan.swap_out_device_blocks)]
        if plan.copy_sources:
            device[list(plan.copy_destinations)] = device[list(plan.copy_sources)]
        if plan.swap_in_host_blocks:
            device[list(plan.swap_in_device_blocks)] = host[list(plan.swap_in_host_blocks)]

    def _extend_chains(self, rows: RowTable, batch: StepBatch) -> None:
        """Chain each sequence up to its context in this step, at least by one token."""
        sequence_rows = batch.sequence_rows
        begins = self._num_chained[sequence_rows]
        index, positions = _spread(begins, batch.context_lens)
        token_rows = sequence_rows[index]
        tokens = rows.tokens[token_rows, positions].astype(np.uint64)
        hashes = mix(mix(positions.astype(np.uint64)) ^ tokens)
        sums = np.cumsum(hashes)
        # What the running sum has too much of, or too little, in each sequence.
        lengths = batch.context_lens - begins
        firsts = np.cumsum(lengths) - lengths
        roots = mix(rows.state["lineage"][sequence_rows])
        bases = np.where(begins > 0, self._chains[sequence_rows, begins - 1], roots)
        offsets = bases - (sums[firsts] - hashes[firsts])
        self._chains[token_rows, positions] = sums + offsets[index]
        self._num_chained[sequence_rows] = batch.context_lens

    def _write(self, step_id: int, rows: RowTable, batch: StepBatch) -> None:
        lengths = np.diff(batch.chunk_starts)
        decodes = np.ones(batch.num_decodes, np.int64)
        token_rows = np.repeat(batch.sequence_rows, np.concatenate([decodes, lengths]))
        written = np.zeros(batch.num_tokens, _SLOT)
        written["tag"] = self._tags(token_rows, batch.positions)
        written["lineage"] = rows.state["lineage"][token_rows]
        written["step_id"] = step_id
        written["row"] = token_rows
        written["position"] = batch.positions
        self._device.reshape(-1)[batch.slots] = written

    def _read(self, rows: RowTable, batch: StepBatch) -> None:
        index, positions = _spread(np.zeros_like(batch.context_lens), batch.context_lens)
        blocks = batch.block_tables[index, positions // self._block_size]
        offsets = positions % self._block_size
        expected = self._tags(batch.sequence_rows[index], positions)
        wrong = np.flatnonzero(self._device["tag"][blocks, offsets] != expected)
        if wrong.size:
            first = wrong[0]
            row, position = int(batch.sequence_rows[index[first]]), int(positions[first])
            lineage = int(rows.state["lineage"][row])
            block, offset = int(blocks[first]), int(offsets[first])
            found = _describe(self._device[block, offset], lineage, position)
            raise KvCheckFailed(
                f"row {row} (lineage {lineage:#x}) reads position {position} from block "
                f"{block}, offset {offset}, {found}; wrong slots in this step: {wrong.size}"
            )

    def _tags(self, rows: Ints, positions: Ints) -> Tags:
        tags: Tags = self._chains[rows, positions] | _WRITTEN
        return tags


def _spread(begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """All positions of some ranges, flat: which range each one is of, and the position."""
    lengths = ends - begins
    index = np.repeat(np.arange(len(lengths)), lengths)
    firsts = np.cumsum(lengths) - lengths
    return index, np.arange(len(index)) - (firsts - begins)[index]


def _describe(slot: np.void, lineage: int, position: int) -> str:
    """What stands in a slot, as a clause, for a reader of this lineage and position."""
    if not slot["tag"]:
        return "which nobody has written"
    same = (int(slot["lineage"]), int(slot["position"])) == (lineage, position)
    return (
        f"which holds position {slot['position']} of row {slot['row']} "
        f"(lineage {int(slot['lineage']):#x}){' after other tokens' if same else ''}, "
        f"written in step {slot['step_id']}"
    )
