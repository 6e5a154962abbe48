"""What goes into the executor and what comes out: plain values, no protobuf.

The fields and their order of work are those of executor.proto.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType

RowId = NewType("RowId", int)
"""Number of a row, chosen by the scheduler."""

BlockId = NewType("BlockId", int)
"""Number of a physical block in the device or the host pool."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row's next token is drawn; the bounds are those of types.proto."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RowStart:
    """A new row: its known tokens and the first entries of its block table."""

    row: int
    tokens: Sequence[int]
    num_prompt_tokens: int
    blocks: Sequence[int]
    num_computed_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    sample_index: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    num_beam_candidates: int = 0
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    lineage: int = 0


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Sets a row's block table from one logical block on."""

    row: int
    first_logical_block: int
    blocks: Sequence[int]
    truncate: bool = False


class StepErrorKind(enum.Enum):
    """Why a step failed as a whole."""

    OUT_OF_MEMORY = "out_of_memory"
    INVALID_PLAN = "invalid_plan"
    KV_CHECK = "kv_check"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class StepError:
    """A step failed: every row is forgotten until the next claim."""

    kind: StepErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's delta. Lists of one comment are parallel arrays of equal length."""

    epoch: int = 0
    step_id: int = 0
    finish_rows: Sequence[int] = ()
    starts: Sequence[RowStart] = ()
    # beam children
    child_parents: Sequence[int] = ()
    child_rows: Sequence[int] = ()
    child_tokens: Sequence[int] = ()
    table_updates: Sequence[TableUpdate] = ()
    # tables growing by one block
    append_rows: Sequence[int] = ()
    append_blocks: Sequence[int] = ()
    # swap-out
    swap_out_device_blocks: Sequence[int] = ()
    swap_out_host_blocks: Sequence[int] = ()
    # copies within the device
    copy_sources: Sequence[int] = ()
    copy_destinations: Sequence[int] = ()
    # swap-in
    swap_in_host_blocks: Sequence[int] = ()
    swap_in_device_blocks: Sequence[int] = ()
    decode_leave_rows: Sequence[int] = ()
    decode_enter_rows: Sequence[int] = ()
    # prefill chunks
    chunk_rows: Sequence[int] = ()
    chunk_counts: Sequence[int] = ()
    # forks
    fork_parents: Sequence[int] = ()
    fork_rows: Sequence[int] = ()
    fork_sample_indices: Sequence[int] = ()
    broken: StepError | None = None
    """The message could not be read as a plan: the step fails with this."""
    encode: Callable[[], bytes] | None = field(default=None, compare=False, repr=False)
    """Gives the message as it came, for other ranks of this executor."""


@dataclass(frozen=True, slots=True)
class Position:
    """Log-probabilities of one position: the chosen token and the likeliest ones."""

    chosen_token: int
    chosen_logprob: float
    top_tokens: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """What one row asked to be told about its positions."""

    row: int
    sampled: Position | None = None
    prompt: Sequence[Position] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a step's time went, in nanoseconds of the monotonic clock."""

    queue_ns: int = 0
    idle_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    move_ns: int = 0
    """A part of forward_ns: block copies and swaps."""
    sample_ns: int = 0
    begin_ns: int = 0
    """When the step began, by the monotonic clock. Not told to the scheduler."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to one plan: tokens by ascending row, or one error for all."""

    epoch: int = 0
    step_id: int = 0
    tokens: Sequence[int] = ()
    logprobs: Sequence[RowLogprobs] = ()
    row_errors: Sequence[tuple[int, str]] = ()
    error: StepError | None = None
    timings: Timings = Timings()


@dataclass(frozen=True, slots=True)
class RowDigest:
    """Sums up one row, to be compared with what the scheduler believes."""

    row: int
    num_tokens: int
    num_computed_tokens: int
    table_crc32: int


@dataclass(frozen=True, slots=True)
class Description:
    """What this executor is."""

    model: str
    fingerprint: str
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    max_num_rows: int
    vocab_size: int
    block_bytes: int
    device: str
    attention: str
    octavo_version: str
    tensor_parallel_size: int = 1
