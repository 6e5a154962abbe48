"""The state that the phases of a step share, and the few deeds all of them need.

Who is where:

    waiting     groups that never ran, in the policy's order
    preempted   groups that ran and wait to come back (PREEMPTED or SWAPPED), by key
    running     groups that hold blocks, by key
    prefilling  sequences of running groups with known tokens still to compute
    ready       sequences of running groups that want into the decode set
    decode_set  sequences by ascending row, one token each a step
    due         members of the decode set that a coming step finds at their horizon
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.events import Event, EventKind
from scheduler_svc.core.queue_wait import QueueWait
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.sequence import DecodeClock, GroupStatus, Sequence, SequenceGroup
from scheduler_svc.core.step import DecodeSet, RowLogprobs, StepPlan, StepRecord, row_of
from scheduler_svc.core.waiting import FairQueue, OrderedQueue, WaitingQueue, fcfs_key, priority_key

if TYPE_CHECKING:
    from scheduler_svc.core.beam import Hypothesis


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Limits and policies of one scheduler core.

    Attributes:
        num_blocks: blocks of the executor's device pool.
        block_size: tokens per block.
        num_host_blocks: blocks of its host pool; 0 turns swapping off.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: sequences that run at once; rows on the executor.
        max_queue: groups that may wait for admission.
        max_queue_seconds: the wait, as estimated, beyond which none is taken; 0: any.
        watermark: share of the pool kept free at admission, so that running
            sequences can grow.
        max_steps_in_flight: plans that may be unacknowledged.
        preemption: "recompute", "swap" or "auto" (by measured cost).
        policy: "fcfs", "priority" or "fair".
        prefix_cache: share blocks between requests with equal prefixes.
    """

    num_blocks: int
    block_size: int = 16
    num_host_blocks: int = 0
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 128
    max_queue: int = 1024
    max_queue_seconds: float = 0.0
    watermark: float = 0.01
    max_steps_in_flight: int = 2
    preemption: str = "recompute"
    policy: str = "priority"
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        """Refuse combinations that could not make progress."""
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(
                "max_num_batched_tokens must be larger than max_num_seqs, so that prompts "
                f"go on beside a full decode set; got {self.max_num_batched_tokens} and "
                f"{self.max_num_seqs}"
            )
        if self.preemption not in ("recompute", "swap", "auto"):
            raise ValueError(f"preemption must be recompute, swap or auto, got {self.preemption}")
        if self.policy not in ("fcfs", "priority", "fair"):
            raise ValueError(f"policy must be fcfs, priority or fair, got {self.policy}")


@dataclass(slots=True)
class Counters:
    """Totals that only grow; the message of the same name says what each counts."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_recompute_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_copied_blocks: int = 0
    num_prefix_hit_tokens: int = 0
    num_prefix_query_tokens: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_discarded_tokens: int = 0
    live_slot_steps: int = 0
    allocated_slot_steps: int = 0
    num_resyncs: int = 0
    saved_block_steps: int = 0
    executor_idle_ns: int = 0
    executor_busy_ns: int = 0
    num_adopted: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the totals by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(slots=True)
class Outcome:
    """What has happened since it was last taken.

    `sampled` and `tokens` are parallel: a sequence and its new token, in order of
    time. `finished` are sequences that ended (their reason is on them), `admitted`
    groups that ran for the first time, `hypotheses` the results of beam searches, `events`
    what else happened to groups, in order.
    """

    sampled: list[Sequence] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[Sequence, RowLogprobs]] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    errors: dict[Sequence, str] = field(default_factory=dict)
    admitted: list[SequenceGroup] = field(default_factory=list)
    hypotheses: list[tuple[SequenceGroup, list[Hypothesis]]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class SchedulerState:
    """Everything the core knows; the phases of `Scheduler.plan` work on it."""

    def __init__(self, config: CoreConfig) -> None:
        """Start empty."""
        self.config = config
        self.waiting: WaitingQueue = FairQueue() if config.policy == "fair" else OrderedQueue()
        self.key = fcfs_key if config.policy == "fcfs" else priority_key
        self.groups: dict[str, SequenceGroup] = {}
        self.preempted: list[SequenceGroup] = []
        # Groups that were in a failed step and have not drawn a token since.
        self.suspects: set[SequenceGroup] = set()
        # Outputs of the live groups at most, and what waiting ones have to compute first.
        self.num_output_tokens = 0
        self.num_waiting_tokens = 0
        # When the last step was planned, on the clock of arrivals.
        self.now = 0.0
        self.queue_wait = QueueWait()
        self.counters = Counters()
        self.outcome = Outcome()
        self.start_over(config)

    def start_over(self, config: CoreConfig) -> None:
        """Begin with an executor whose pool is empty and which has no rows."""
        self.config = config
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.num_host_blocks)
        self.running: list[SequenceGroup] = []
        self.prefilling: list[Sequence] = []
        self.ready: list[Sequence] = []
        self.decode_set = DecodeSet()
        self.decode_set_changed = False
        # All of the decode set move on by a token a step, so it is known ahead at which
        # step each is at its horizon. Entries of those that left since are skipped.
        self.clock = DecodeClock()
        # How many decode, and what they had drawn, all together, at the clock's zero.
        self.num_decoding = self.num_drawn_at_zero = 0
        self.due: dict[int, list[Sequence]] = {}
        self.starved: Sequence | None = None
        # Blocks that stalled groups wait for: nobody behind them in line may take them.
        self.num_owed_blocks = 0
        self.in_flight: deque[StepRecord] = deque()
        # Until a step ends, the executor's wait for it was for requests, not for a plan.
        self.had_no_request = True
        # Groups were told that this executor is lost to them.
        self.is_loss_told = False
        self.free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self.num_promised_rows = 0
        # The plan under construction, the chunks in it and who samples beside the
        # decode set. What is decided between steps goes into it at once.
        self.plan = StepPlan(step_id=1)
        self.chunks: list[tuple[Sequence, int, int]] = []
        self.sampling: list[Sequence] = []

    @property
    def fence(self) -> int | None:
        """Newest step in flight: what is given back now is fenced by it."""
        return self.in_flight[-1].step_id if self.in_flight else None

    def note(
        self,
        kind: EventKind,
        group: SequenceGroup,
        *,
        by: SequenceGroup | None = None,
        detail: str = "",
        num_tokens: int = 0,
    ) -> None:
        """Tell what happened to a group, and who caused it."""
        other = "" if by is None or by is group else by.request.request_id
        self.outcome.events.append(Event(kind, group, other, detail, num_tokens))

    # -- groups --------------------------------------------------------------------

    def hold(self, group: SequenceGroup) -> None:
        """Count a group among the live ones."""
        self.groups[group.request.request_id] = group
        self.num_output_tokens += group.num_output_tokens_at_most

    def release(self, group: SequenceGroup) -> None:
        """Count a group no longer."""
        del self.groups[group.request.request_id]
        self.num_output_tokens -= group.num_output_tokens_at_most

    @property
    def load_tokens(self) -> int:
        """Tokens still to be computed here, at most; it costs nothing that grows with decodes."""
        prompts = self.num_waiting_tokens
        prompts += sum(len(seq.tokens) - seq.num_scheduled for seq in self.prefilling)
        again = (g for g in self.preempted if g.status is GroupStatus.PREEMPTED)
        prompts += sum(group.num_known_tokens for group in again)
        drawn = self.num_drawn_at_zero + self.num_decoding * self.clock.num_steps
        return prompts + self.num_output_tokens - drawn

    def enqueue(self, group: SequenceGroup) -> None:
        """Let a group wait for its first admission."""
        self.queue_wait.note_arrival(group.request.arrival, len(self.waiting))
        self.waiting.push(group)
        self.num_waiting_tokens += group.num_uncached_tokens

    def dequeue(self) -> None:
        """Take out the next in line, which is admitted."""
        self.num_waiting_tokens -= self.waiting.pop().num_uncached_tokens

    def enqueue_preempted(self, group: SequenceGroup) -> None:
        """Let a group wait to come back; it keeps its place in line."""
        insort(self.preempted, group, key=lambda g: g.key)

    def enter_running(self, group: SequenceGroup) -> None:
        """Count a group among those that hold blocks."""
        group.status = GroupStatus.RUNNING
        insort(self.running, group, key=lambda g: g.key)

    def leave_running(self, group: SequenceGroup) -> None:
        """Take a group and its sequences out of all lists of running ones."""
        index = bisect_left(self.running, group.key, key=lambda g: g.key)
        assert self.running[index] is group
        del self.running[index]
        self.prefilling = [s for s in self.prefilling if s.group is not group]
        self.ready = [s for s in self.ready if s.group is not group]

    def leave_decode_set(self, seq: Sequence, *, row_goes_on: bool = True) -> None:
        """Take a sequence out of the decode set; tell the executor if its row lives on."""
        if seq.in_decode_set:
            self._count_decoding(seq, -1)
            seq.stop_decoding()
            self.decode_set_changed = True
            if row_goes_on:
                assert seq.row is not None
                self.plan.decode_leave_rows.append(seq.row)

    def refresh_decode_set(self, entering: list[Sequence]) -> None:
        """Build the decode set anew after sequences left, and with those that enter."""
        for seq in entering:
            seq.start_decoding(self.clock)
            self._count_decoding(seq, 1)
            self.plan.decode_enter_rows.append(row_of(seq))
        if entering or self.decode_set_changed:
            stay = dict.fromkeys(s for s in self.decode_set.members if s.in_decode_set)
            self.decode_set = DecodeSet.of(stay | dict.fromkeys(entering))
            self.decode_set_changed = False

    def _count_decoding(self, seq: Sequence, sign: int) -> None:
        self.num_decoding += sign
        drawn = seq.num_scheduled - seq.num_prompt_tokens - self.clock.num_steps
        self.num_drawn_at_zero += sign * drawn

    def set_horizon(self, seq: Sequence) -> None:
        """Note when a sequence that decodes from now on will need more than a plain step."""
        seq.horizon = min(len(seq.block_table) * self.blocks.block_size, seq.limit)
        step = self.clock.num_steps + seq.horizon - seq.num_scheduled
        self.due.setdefault(step, []).append(seq)

    def take_due(self) -> list[Sequence]:
        """Return the members of the decode set that are at their horizon."""
        at_horizon = self.due.pop(self.clock.num_steps, ())
        return [
            seq
            for seq in dict.fromkeys(at_horizon)
            if seq.in_decode_set and seq.num_scheduled >= seq.horizon
        ]

    # -- rows ----------------------------------------------------------------------

    @property
    def num_unpromised_rows(self) -> int:
        """Rows that a group may still be promised."""
        return self.config.max_num_seqs - self.num_promised_rows

    def promise_rows(self, group: SequenceGroup, num_rows: int) -> None:
        """Keep rows for all sequences that the group has or will fork."""
        self.num_promised_rows += num_rows - group.rows_promised
        group.rows_promised = num_rows

    def take_row(self, seq: Sequence) -> int:
        """Give a sequence a row of the executor."""
        seq.row = self.free_rows.pop()
        seq.accepts = seq.group.beam is None and seq.limit >= seq.num_prompt_tokens
        return seq.row

    def give_row_back(self, seq: Sequence) -> None:
        """Finish the sequence's row with the next plan."""
        if seq.row is not None:
            # A plan without work is not sent but added to: its rows may still leave.
            if seq.row in self.plan.decode_leave_rows:
                self.plan.decode_leave_rows.remove(seq.row)
            self.plan.finish_rows.append(seq.row)
            self.free_rows.append(seq.row)
            seq.row = None

    # -- the end of a sequence -----------------------------------------------------

    def finish(
        self, seq: Sequence, reason: FinishReason, error: str = "", *, is_reported: bool = True
    ) -> None:
        """End a sequence: blocks and row go back, and its group if it was the last.

        Args:
            is_reported: it is one of the request's choices, not a beam that ended.
        """
        assert seq.finish_reason is None
        seq.finish_reason = reason
        self.withdraw(seq)
        self.leave_decode_set(seq, row_goes_on=False)
        self.blocks.free(seq, self.fence)
        self.give_row_back(seq)
        if is_reported:
            self.outcome.finished.append(seq)
        if error:
            self.outcome.errors[seq] = error
        group = seq.group
        if group.beam is None and group.rows_promised:
            self.promise_rows(group, group.rows_promised - 1)
        if group.unforked == 0 and not group.live:
            self._finish_group(group)
        elif group.status is GroupStatus.RUNNING:
            self.prefilling = [s for s in self.prefilling if s is not seq]
            self.ready = [s for s in self.ready if s is not seq]

    def withdraw(self, seq: Sequence) -> None:
        """Let tokens that are in flight no longer become the sequence's next as they are."""
        if seq.accepts and seq.num_pending:
            for record in self.in_flight:
                record.decode_set = None
        seq.accepts = False

    def abandon(self, group: SequenceGroup, reason: FinishReason, error: str = "") -> None:
        """End all of a group's choices, also those that have not forked yet."""
        for index in range(len(group.sequences), len(group.sequences) + group.unforked):
            group.sequences.append(Sequence(group, index, list(group.request.prompt_tokens)))
        group.unforked = 0
        for seq in group.live:
            self.finish(seq, reason, error)

    def _finish_group(self, group: SequenceGroup) -> None:
        status, group.status = group.status, GroupStatus.FINISHED
        if status is GroupStatus.WAITING:
            self.waiting.discard(group)
            self.num_waiting_tokens -= group.num_uncached_tokens
        elif status is GroupStatus.RUNNING:
            self.leave_running(group)
        else:
            self.preempted.remove(group)
        if self.starved is not None and self.starved.group is group:
            self.starved = None
        self.promise_rows(group, 0)
        self.suspects.discard(group)
        if group.admitted_at is not None:
            self.queue_wait.note_end(self.now - group.admitted_at)
        self.release(group)
        self.counters.num_finished += 1
