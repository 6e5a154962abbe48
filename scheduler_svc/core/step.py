"""Plans and results as plain values: what executor.proto says, without protobuf."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_svc.core.block_pool import BlockId
from scheduler_svc.core.request import PositionLogprobs
from scheduler_svc.core.sequence import Sequence


@dataclass(slots=True)
class StepPlan:
    """One step's delta; field for field the message of the same name.

    Lists that share a prefix are parallel. `children` are (parent row, child row,
    token), `replacements` (row, logical block, block), `tables` (row, whole block
    table), `forks` (parent row, new row, sample index).
    """

    step_id: int
    finish_rows: list[int] = field(default_factory=list)
    starts: list[RowStart] = field(default_factory=list)
    children: list[tuple[int, int, int]] = field(default_factory=list)
    replacements: list[tuple[int, int, BlockId]] = field(default_factory=list)
    tables: list[tuple[int, list[BlockId]]] = field(default_factory=list)
    append_rows: list[int] = field(default_factory=list)
    append_blocks: list[BlockId] = field(default_factory=list)
    swap_out_device_blocks: list[BlockId] = field(default_factory=list)
    swap_out_host_blocks: list[BlockId] = field(default_factory=list)
    copy_sources: list[BlockId] = field(default_factory=list)
    copy_destinations: list[BlockId] = field(default_factory=list)
    swap_in_host_blocks: list[BlockId] = field(default_factory=list)
    swap_in_device_blocks: list[BlockId] = field(default_factory=list)
    decode_leave_rows: list[int] = field(default_factory=list)
    decode_enter_rows: list[int] = field(default_factory=list)
    chunk_rows: list[int] = field(default_factory=list)
    chunk_counts: list[int] = field(default_factory=list)
    forks: list[tuple[int, int, int]] = field(default_factory=list)
    num_decodes: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that this step computes."""
        return self.num_decodes + sum(self.chunk_counts)

    @property
    def has_work(self) -> bool:
        """The executor has something to compute, to move or to make a row of.

        Rows that end or leave the decode set can wait for the next plan.
        """
        return bool(
            self.num_decodes
            or self.chunk_rows
            or self.starts
            or self.swap_out_device_blocks
            or self.swap_in_host_blocks
        )


@dataclass(slots=True)
class RowStart:
    """A new row, frozen when the plan is sealed."""

    row: int
    tokens: list[int]
    num_computed_tokens: int
    blocks: list[BlockId]
    sequence: Sequence


class StepErrorKind(enum.Enum):
    """Why a step failed."""

    OUT_OF_MEMORY = "out_of_memory"
    INVALID_PLAN = "invalid_plan"
    KV_CHECK = "kv_check"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class StepError:
    """The whole step failed; the executor has forgotten its rows."""

    kind: StepErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of one row's sampled and prompt positions."""

    sampled: PositionLogprobs | None
    prompt: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Nanoseconds by the executor's clock; `move_ns` is a part of `forward_ns`."""

    queue_ns: int = 0
    idle_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    move_ns: int = 0


@dataclass(slots=True)
class StepResult:
    """Answer to one plan: one token per row that sampled, by ascending row."""

    step_id: int
    tokens: list[int]
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    row_errors: dict[int, str] = field(default_factory=dict)
    error: StepError | None = None
    timings: StepTimings = field(default_factory=StepTimings)


@dataclass(frozen=True, slots=True)
class DecodeSet:
    """Who computes one token in every step, by ascending row; replaced, never changed.

    `rows` and `tokens` are the members' own; `stop_token_ids` is all that ends any of them.
    """

    members: list[Sequence] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, sequences: Iterable[Sequence]) -> DecodeSet:
        """Order sequences that have rows."""
        members = sorted(sequences, key=row_of)
        stops = {seq.stops for seq in members}
        return cls(
            members,
            [row_of(seq) for seq in members],
            [seq.tokens for seq in members],
            frozenset().union(*stops),
        )


def row_of(seq: Sequence) -> int:
    """Row of a sequence that has one."""
    assert seq.row is not None
    return seq.row


@dataclass(slots=True)
class StepRecord:
    """What the scheduler must remember of a step in flight.

    `sampled` are the sequences that draw a token, by ascending row as of this step, and
    `rows` those rows. `at_border` are those of them whose token fills a block, is the
    last by length, or is the first since they started. `chunks` are (sequence, first
    position, count) and `chunk_rows` their rows. `decode_set` is there while all of it, and
    nobody else, draws and still wants a token. The lists are never changed after the plan
    is sealed.
    """

    step_id: int
    sampled: list[Sequence]
    rows: list[int]
    at_border: list[Sequence]
    chunks: list[tuple[Sequence, int, int]]
    chunk_rows: list[int]
    num_tokens: int
    num_moved_blocks: int = 0
    decode_set: DecodeSet | None = None
