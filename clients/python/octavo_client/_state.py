"""What an operator gets to see of a scheduler: plain frozen values, nothing of protobuf.

The names and units are those of `octavo/v1/admin.proto`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
class StepSample:
    """One step that was executed.

    Its time is plan + wire + queue + prepare + forward + sample; `idle_ns` came before it.
    """

    step_id: int
    planned_unix_ns: int
    plan_ns: int
    wire_ns: int
    queue_ns: int
    idle_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    num_decodes: int
    num_chunk_tokens: int
    num_sampled: int
    plan_bytes: int
    copied_blocks: tuple[int, ...]
    swapped_out_blocks: tuple[int, ...]
    swapped_in_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Executor:
    """One executor, as its scheduler sees it.

    Attributes:
        steps: those that ended since the last snapshot of a watch, oldest first; in a single
            snapshot the latest.
    """

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
    steps: tuple[StepSample, ...]


@dataclass(frozen=True, slots=True)
class Latency:
    """What streams saw in the last ten seconds; all 0 if there was none.

    TTFT is the time from a request's arrival to its first token, ITL that between two tokens
    of a sequence.
    """

    num_first_tokens: int
    ttft_p50_seconds: float
    ttft_p99_seconds: float
    num_later_tokens: int
    itl_p50_seconds: float
    itl_p99_seconds: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A scheduler's state between two steps."""

    scheduler_id: str
    time_unix_ns: int
    executors: tuple[Executor, ...]
    latency: Latency


class EventKind(StrEnum):
    """What happened to a request; UNKNOWN is one that this client does not know yet."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    BLOCKED = "blocked"
    ADMITTED = "admitted"
    FIRST_TOKEN = "first_token"
    PREEMPTED_RECOMPUTE = "preempted_recompute"
    PREEMPTED_SWAP = "preempted_swap"
    SWAPPED_IN = "swapped_in"
    RESUMED = "resumed"
    EXECUTOR_LOST = "executor_lost"
    MOVED = "moved"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """Something that happened to a request.

    Attributes:
        executor: that it happened on; "" if on none.
        other_request_id: of the request that caused it; "" if none did.
        num_tokens: cached prompt tokens of an admission, tokens lost of a preemption, tokens
            generated at an end.
    """

    kind: EventKind
    time_unix_ns: int
    executor: str = ""
    other_request_id: str = ""
    detail: str = ""
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """The story of one request.

    Attributes:
        num_generated_tokens: so far, over all choices.
        events: in order of time.
        num_events_dropped: from the middle, because there were too many.
        trace_id: 32 hexadecimal digits; "" if the request was not traced.
    """

    request_id: str
    tenant: str
    priority: int
    num_prompt_tokens: int
    num_generated_tokens: int
    events: tuple[RequestEvent, ...]
    num_events_dropped: int
    trace_id: str
