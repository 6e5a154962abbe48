"""What the client hands out and takes in: plain frozen values, nothing of protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Health(StrEnum):
    """What a service says about itself (grpc.health.v1)."""

    SERVING = "serving"
    NOT_SERVING = "not_serving"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Beam:
    """Beam search instead of sampling.

    Attributes:
        width: beams kept at each step, 2 to 16.
        length_penalty: power of the length that divides a beam's score; None: 1.
        early_stopping: end as soon as `width` beams are finished.
    """

    width: int
    length_penalty: float | None = None
    early_stopping: bool = False


class GenerateParams(TypedDict, total=False):
    """How to generate; each may be left out, and then the service's default holds.

    The names, units and bounds are those of `octavo.v1.GenerateRequest`, flattened.
    """

    request_id: str
    model: str
    # Sampling.
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    # Stopping.
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    include_stop: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    # Several choices.
    n: int
    best_of: int
    beam: Beam
    # Output.
    omit_text: bool
    logprobs: int
    prompt_logprobs: int
    echo: bool
    keep_special_tokens: bool
    # Scheduling.
    priority: int
    tenant: str
    cache_disable: bool
    cache_salt: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities of one position: the token that stands there, the likeliest ones."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted. First event of a stream, once."""

    request_id: str
    model: str
    num_prompt_tokens: int
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """More of one choice. Texts of one choice concatenate to its final text."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """One choice ended.

    Attributes:
        stopped_by: the stop string or stop token id that matched; None: end of
            sequence, or no stop.
    """

    index: int
    reason: FinishReason
    num_tokens: int
    stopped_by: str | int | None = None
    cumulative_logprob: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Sum over the request. Last event of a stream, once."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    num_preemptions: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0


Event = Started | Delta | Finished | Usage


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole continuation; the prompt_* parts are there if echo or prompt_logprobs asked."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[PositionLogprobs, ...] = ()
    stopped_by: str | int | None = None
    cumulative_logprob: float | None = None
    error: str = ""
    prompt_text: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    model: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids


@dataclass(frozen=True, slots=True)
class Model:
    """The model that is served."""

    model: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    kv_capacity_tokens: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Pool:
    """Counts of blocks and slots. free + cached + referenced = total."""

    block_size: int
    num_total: int
    num_free: int
    num_cached: int
    num_referenced: int
    num_shared: int
    num_fenced: int
    num_host_total: int
    num_host_free: int
    live_slots: int
    reserved_slots: int
    internal_waste_slots: int
    external_waste_slots: int


@dataclass(frozen=True, slots=True)
class Counters:
    """What an executor's scheduler counted since it started; they only grow."""

    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_recompute_preemptions: int
    num_swap_preemptions: int
    num_copied_blocks: int
    num_prefix_hit_tokens: int
    num_prefix_query_tokens: int
    num_finished: int
    num_cancelled: int
    num_discarded_tokens: int
    live_slot_steps: int
    allocated_slot_steps: int
    num_resyncs: int
    saved_block_steps: int
    executor_idle_ns: int
    executor_busy_ns: int
    num_adopted: int


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """One live sequence."""

    request_id: str
    sample_index: int
    row: int
    status: str
    num_tokens: int
    num_computed_tokens: int
    block_table: tuple[int, ...]
    tenant: str
    priority: int
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """State of every block, by block id. Kinds: 0 free, 1 cached, 2 referenced, 3 fenced."""

    ref_counts: tuple[int, ...]
    kinds: bytes


@dataclass(frozen=True, slots=True)
class Executor:
    """One executor, as its scheduler sees it."""

    address: str
    connected: bool
    epoch: int
    step_id: int
    num_queued: int
    num_running: int
    num_preempted: int
    num_draining_rows: int
    draining: bool
    load_tokens: int
    pool: Pool
    counters: Counters
    sequences: tuple[SequenceInfo, ...]
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A scheduler's state between two steps."""

    scheduler_id: str
    executors: tuple[Executor, ...]
