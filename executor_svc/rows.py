"""The row table: what the executor remembers of each sequence between steps.

Everything here is host memory and numpy; nothing touches the device. A plan's
deltas are applied in the order that executor.proto fixes, and whatever is wrong
with a plan is found here, before a block is moved or a token computed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor_svc.errors import InvalidPlan
from executor_svc.plan import Plan, RowDigest, RowStart, TableUpdate
from executor_svc.sampling_bounds import check_sampling

_STATE = np.dtype(
    [
        ("num_tokens", np.int64),
        ("num_computed", np.int64),
        ("num_prompt", np.int64),
        ("num_blocks", np.int64),
        ("sample_index", np.int64),
        ("num_logprobs", np.int64),  # -1: none asked for
        ("num_prompt_logprobs", np.int64),  # -1: none asked for
        ("num_beam_candidates", np.int64),
        ("min_tokens", np.int64),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("repetition_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("frequency_penalty", np.float64),
        ("seed", np.uint64),
        ("lineage", np.uint64),
        ("has_penalties", np.bool_),
        ("live", np.bool_),
    ]
)


@dataclass(frozen=True, slots=True)
class Restrictions:
    """The rarely used parts of a row's sampling, as arrays."""

    bias_tokens: npt.NDArray[np.int64]
    bias_values: npt.NDArray[np.float32]
    allowed_tokens: npt.NDArray[np.int64]
    stop_tokens: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that bound every plan, in rows, tokens and blocks."""

    max_num_rows: int
    max_model_len: int
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    vocab_size: int
    max_num_batched_tokens: int


class RowTable:
    """Known tokens, block table, sampling and decode membership of every row.

    Invariant: of a live row, num_computed <= num_tokens <= max_model_len + 1, and
    every entry of its table below num_blocks is a block of the device pool. The
    arrays are allocated once; the kernel backs them with memory as rows use them.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        num_rows = limits.max_num_rows
        # One token more than the model's context: the last one drawn is never computed.
        self.token_capacity = limits.max_model_len + 1
        self.block_capacity = -(-self.token_capacity // limits.block_size)
        self.tokens = np.zeros((num_rows, self.token_capacity), np.int32)
        self.tables = np.zeros((num_rows, self.block_capacity), np.int32)
        self.state = np.zeros(num_rows, _STATE)
        self.in_decode = np.zeros(num_rows, np.bool_)
        # How often each number has become another row.
        self.births = np.zeros(num_rows, np.int64)
        self.restrictions: dict[int, Restrictions] = {}
        self._decode_rows: npt.NDArray[np.int64] | None = None
        # Views into the columns, made once.
        self.num_tokens = self.state["num_tokens"]
        self.num_computed = self.state["num_computed"]
        self.num_blocks = self.state["num_blocks"]
        self.live = self.state["live"]

    def reset(self) -> None:
        """Forget every row."""
        self.state[:] = np.zeros((), _STATE)
        self.in_decode[:] = False
        self.births += 1
        self.restrictions.clear()
        self._decode_rows = None

    @property
    def num_live(self) -> int:
        """How many rows exist."""
        return int(self.live.sum())

    @property
    def decode_rows(self) -> npt.NDArray[np.int64]:
        """The persistent decode set, ascending."""
        if self._decode_rows is None:
            self._decode_rows = np.flatnonzero(self.in_decode)
        return self._decode_rows

    def apply(self, plan: Plan) -> None:
        """Apply all deltas that come before the forward pass.

        Raises:
            InvalidPlan: if the plan breaks the protocol; the table is then in no
                defined state and must be reset.
        """
        self._finish(plan.finish_rows)
        for start in plan.starts:
            self._start(start)
        self._make_children(plan)
        for update in plan.table_updates:
            self._update_table(update)
        self._append_blocks(plan)
        self._check_moves(plan)
        self._change_decode_set(plan)

    def append_tokens(self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """Append one token to each of the rows (distinct, live)."""
        self.tokens[rows, self.count_tokens(rows)] = tokens

    def count_tokens(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Count one more token of each of the rows; returns the positions to write them to."""
        positions = self.num_tokens[rows]
        self.num_tokens[rows] = positions + 1
        return positions

    def copy_rows(self, parents: Sequence[int], children: Sequence[int]) -> None:
        """Make each child equal its parent; all parents are read, then all written.

        Membership in the decode set belongs to the row number and is not copied.
        """
        num_tokens = int(self.num_tokens[parents].max(initial=0))
        num_blocks = int(self.num_blocks[parents].max(initial=0))
        self.tokens[children, :num_tokens] = self.tokens[parents, :num_tokens]
        self.tables[children, :num_blocks] = self.tables[parents, :num_blocks]
        self.state[children] = self.state[parents]
        self.births[children] += 1
        inherited = [self.restrictions.get(parent) for parent in parents]
        for child, restrictions in zip(children, inherited, strict=True):
            if restrictions is None:
                self.restrictions.pop(child, None)
            else:
                self.restrictions[child] = restrictions

    def digests(self) -> list[RowDigest]:
        """Digest of every row's table and length, by ascending row."""
        digests = []
        for row in np.flatnonzero(self.live).tolist():
            table = self.tables[row, : self.num_blocks[row]].astype("<u4")
            digests.append(
                RowDigest(
                    row=row,
                    num_tokens=int(self.num_tokens[row]),
                    num_computed_tokens=int(self.num_computed[row]),
                    table_crc32=zlib.crc32(table.tobytes()),
                )
            )
        return digests

    def require_live(self, row: int, where: str) -> None:
        """Check that a row exists.

        Raises:
            InvalidPlan: if it does not.
        """
        if not (0 <= row < self.limits.max_num_rows and self.live[row]):
            raise InvalidPlan(f"{where}: row {row} does not exist")

    def require_number(self, row: int, where: str) -> None:
        """Check that a row number is within the table.

        Raises:
            InvalidPlan: if it is not.
        """
        if not 0 <= row < self.limits.max_num_rows:
            raise InvalidPlan(
                f"{where}: row {row} is not below max_num_rows {self.limits.max_num_rows}"
            )

    def _finish(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.require_live(row, "finish_rows")
            self.live[row] = False
            self.restrictions.pop(row, None)
            self._leave_decode(row)

    def _start(self, start: RowStart) -> None:
        row, where = start.row, f"starts: row {start.row}"
        self.require_number(row, "starts")
        if self.live[row]:
            raise InvalidPlan(f"{where} exists already")
        num_tokens, num_blocks = len(start.tokens), len(start.blocks)
        if not 1 <= num_tokens <= self.token_capacity:
            raise InvalidPlan(
                f"{where} has {num_tokens} tokens, not between 1 and {self.token_capacity}"
            )
        if not 1 <= start.num_prompt_tokens <= num_tokens:
            raise InvalidPlan(
                f"{where} has num_prompt_tokens {start.num_prompt_tokens} of {num_tokens} tokens"
            )
        if start.num_computed_tokens > num_tokens:
            raise InvalidPlan(
                f"{where} has {start.num_computed_tokens} computed of {num_tokens} tokens"
            )
        if num_blocks * self.limits.block_size < start.num_computed_tokens:
            raise InvalidPlan(
                f"{where} has {num_blocks} blocks for {start.num_computed_tokens} computed tokens"
            )
        self._check_table(start.blocks, 0, where)
        self._check_tokens(start.tokens, where)
        check_sampling(start, self.limits.vocab_size)
        self._check_tokens(list(start.sampling.logit_bias), f"{where}: logit_bias")
        self._check_tokens(start.sampling.allowed_token_ids, f"{where}: allowed_token_ids")
        self.tokens[row, :num_tokens] = start.tokens
        self.tables[row, :num_blocks] = start.blocks
        self.state[row] = _initial_state(start)
        self.births[row] += 1
        restrictions = _restrictions(start, self.limits.vocab_size)
        if restrictions is not None:
            self.restrictions[row] = restrictions

    def _make_children(self, plan: Plan) -> None:
        parents, children, tokens = plan.child_parents, plan.child_rows, plan.child_tokens
        require_parallel(child_parents=parents, child_rows=children, child_tokens=tokens)
        if not children:
            return
        for parent in parents:
            self.require_live(parent, "child_parents")
            if self.num_tokens[parent] >= self.token_capacity:
                raise InvalidPlan(f"child_parents: row {parent} is at the model's longest context")
        for child in children:
            self.require_number(child, "child_rows")
        require_distinct(children, "child_rows", "row")
        self._check_tokens(tokens, "child_tokens")
        self.copy_rows(parents, children)
        self.append_tokens(np.asarray(children), np.asarray(tokens))

    def _update_table(self, update: TableUpdate) -> None:
        row, first = update.row, update.first_logical_block
        self.require_live(row, "table_updates")
        where = f"table_updates: row {row}"
        if first > self.num_blocks[row]:
            raise InvalidPlan(
                f"{where} has {self.num_blocks[row]} blocks, none before logical block {first}"
            )
        self._check_table(update.blocks, first, where)
        end = first + len(update.blocks)
        self.tables[row, first:end] = update.blocks
        self.num_blocks[row] = end if update.truncate else max(end, self.num_blocks[row])

    def _append_blocks(self, plan: Plan) -> None:
        require_parallel(append_rows=plan.append_rows, append_blocks=plan.append_blocks)
        self._check_blocks(plan.append_blocks, self.limits.num_device_blocks, "append_blocks")
        for row, block in zip(plan.append_rows, plan.append_blocks, strict=True):
            self.require_live(row, "append_rows")
            num_blocks = self.num_blocks[row]
            if num_blocks >= self.block_capacity:
                raise InvalidPlan(
                    f"append_rows: the table of row {row} is full at {num_blocks} blocks"
                )
            self.tables[row, num_blocks] = block
            self.num_blocks[row] = num_blocks + 1

    def _check_moves(self, plan: Plan) -> None:
        require_parallel(
            swap_out_device_blocks=plan.swap_out_device_blocks,
            swap_out_host_blocks=plan.swap_out_host_blocks,
        )
        require_parallel(copy_sources=plan.copy_sources, copy_destinations=plan.copy_destinations)
        require_parallel(
            swap_in_host_blocks=plan.swap_in_host_blocks,
            swap_in_device_blocks=plan.swap_in_device_blocks,
        )
        device, host = self.limits.num_device_blocks, self.limits.num_host_blocks
        self._check_blocks(plan.swap_out_device_blocks, device, "swap_out_device_blocks")
        self._check_blocks(plan.swap_out_host_blocks, host, "swap_out_host_blocks")
        self._check_blocks(plan.copy_sources, device, "copy_sources")
        self._check_blocks(plan.copy_destinations, device, "copy_destinations")
        self._check_blocks(plan.swap_in_host_blocks, host, "swap_in_host_blocks")
        self._check_blocks(plan.swap_in_device_blocks, device, "swap_in_device_blocks")
        require_distinct(plan.swap_out_host_blocks, "swap_out_host_blocks", "block")
        require_distinct(plan.copy_destinations, "copy_destinations", "block")
        require_distinct(plan.swap_in_device_blocks, "swap_in_device_blocks", "block")
        # One launch makes all copies, in no order: a chain would have two meanings.
        if plan.copy_sources:
            both = set(plan.copy_sources).intersection(plan.copy_destinations)
            if both:
                raise InvalidPlan(f"copies: block {min(both)} is both source and destination")

    def _change_decode_set(self, plan: Plan) -> None:
        for row in plan.decode_leave_rows:
            self.require_live(row, "decode_leave_rows")
            if not self.in_decode[row]:
                raise InvalidPlan(f"decode_leave_rows: row {row} is not in the decode set")
            self._leave_decode(row)
        for row in plan.decode_enter_rows:
            self.require_live(row, "decode_enter_rows")
            if self.in_decode[row]:
                raise InvalidPlan(f"decode_enter_rows: row {row} is in the decode set already")
            self.in_decode[row] = True
            self._decode_rows = None

    def _leave_decode(self, row: int) -> None:
        if self.in_decode[row]:
            self.in_decode[row] = False
            self._decode_rows = None

    def _check_table(self, blocks: Sequence[int], first: int, where: str) -> None:
        if first + len(blocks) > self.block_capacity:
            raise InvalidPlan(
                f"{where} would have {first + len(blocks)} blocks, more than the "
                f"{self.block_capacity} of the model's longest context"
            )
        self._check_blocks(blocks, self.limits.num_device_blocks, where)

    def _check_blocks(self, blocks: Sequence[int], num_blocks: int, where: str) -> None:
        if blocks and max(blocks) >= num_blocks:
            raise InvalidPlan(f"{where}: block {max(blocks)} is not below {num_blocks}")

    def _check_tokens(self, tokens: Sequence[int], where: str) -> None:
        if tokens and max(tokens) >= self.limits.vocab_size:
            raise InvalidPlan(
                f"{where}: token {max(tokens)} is not below vocab_size {self.limits.vocab_size}"
            )


def require_parallel(**lists: Sequence[int]) -> None:
    """Check that parallel arrays are equally long.

    Raises:
        InvalidPlan: if they are not.
    """
    if len({len(values) for values in lists.values()}) > 1:
        lengths = ", ".join(f"{name} has {len(values)}" for name, values in lists.items())
        raise InvalidPlan(f"parallel arrays differ in length: {lengths}")


def require_distinct(values: Sequence[int], where: str, noun: str) -> None:
    """Check that no value comes twice.

    Raises:
        InvalidPlan: if one does.
    """
    if len(values) > 1 and len(set(values)) != len(values):
        seen: set[int] = set()
        for value in values:
            if value in seen:
                raise InvalidPlan(f"{where}: {noun} {value} comes twice")
            seen.add(value)


def _initial_state(start: RowStart) -> npt.NDArray[np.void]:
    sampling = start.sampling
    state = np.zeros((), _STATE)
    state["num_tokens"] = len(start.tokens)
    state["num_computed"] = start.num_computed_tokens
    state["num_prompt"] = start.num_prompt_tokens
    state["num_blocks"] = len(start.blocks)
    state["sample_index"] = start.sample_index
    state["num_logprobs"] = -1 if start.num_logprobs is None else start.num_logprobs
    state["num_prompt_logprobs"] = (
        -1 if start.num_prompt_logprobs is None else start.num_prompt_logprobs
    )
    state["num_beam_candidates"] = start.num_beam_candidates
    state["min_tokens"] = start.min_tokens
    for name in (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
    ):
        state[name] = getattr(sampling, name)
    state["lineage"] = start.lineage
    state["has_penalties"] = (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
    )
    state["live"] = True
    return state


def _restrictions(start: RowStart, vocab_size: int) -> Restrictions | None:
    sampling = start.sampling
    holds_back_stops = start.min_tokens > 0 and start.stop_token_ids
    if not (sampling.logit_bias or sampling.allowed_token_ids or holds_back_stops):
        return None
    stops = [token for token in start.stop_token_ids if token < vocab_size]
    return Restrictions(
        bias_tokens=np.array(list(sampling.logit_bias), np.int64),
        bias_values=np.array(list(sampling.logit_bias.values()), np.float32),
        allowed_tokens=np.array(sampling.allowed_token_ids, np.int64),
        stop_tokens=np.array(stops if holds_back_stops else [], np.int64),
    )
