"""The scheduler: which tokens every step computes, and in which blocks.

Plain synchronous code without clock, network or randomness. The gRPC engine, the
property tests and the simulator drive the same object:

    add, cancel, stop      requests come and go at any time between steps
    plan(now)              the next step's delta, or None if there is nothing to do or
                           enough steps are in flight
    name_blocks()          in the pause that follows; may be left out
    apply(result, now)     the result of the oldest step in flight
    take_outcome()         new tokens and finished sequences since the last call

A plan is made in phases, each in a module of its own, and each working on what the
one before has left:

    1. make room    preempt for decodes that must grow, for a starved prefill, for
                    urgent arrivals (preemption.py); nobody is scheduled yet
    2. decode       every sequence of the decode set computes one token
    3. prefill      partial prefills go on, in chunks under the token budget (prefill.py)
    4. admit        preempted groups come back, then new ones enter (admission.py)

Decodes first, so that no prompt, however long, stalls the streams.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import takewhile

from scheduler_svc.core import (
    admission,
    beam,
    preemption,
    prefill,
    prefix_cache,
    recovery,
    results,
)
from scheduler_svc.core.cost import CostModel
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.sequence import GroupStatus, Sequence, SequenceGroup
from scheduler_svc.core.state import CoreConfig, Outcome, SchedulerState
from scheduler_svc.core.step import (
    StepError,
    StepPlan,
    StepRecord,
    StepResult,
    row_of,
)
from scheduler_svc.errors import DuplicateRequest, NeverFits

_ACCOUNT_EVERY_STEPS = 8


class Scheduler:
    """Decides every step of one executor.

    Invariants (`invariants.check`): free + cached + referenced == total; a block's
    reference count equals the tables and fences that hold it; computed <= scheduled <=
    known tokens plus samples in flight; every live group is in exactly one place.
    """

    def __init__(self, config: CoreConfig) -> None:
        """Start with an empty executor."""
        self.state = SchedulerState(config)
        self.costs = CostModel()
        self._deadlines: list[tuple[float, int, SequenceGroup]] = []
        self._serial = 0

    # -- requests ------------------------------------------------------------------

    def add(self, request: Request, hashes: Iterable[bytes] = ()) -> SequenceGroup:
        """Take a validated request into the queue.

        `hashes` are those of its prompt's first full blocks, if they are known already.

        Raises:
            DuplicateRequest: a live request has the same id.
            NeverFits: it could not run even alone.
            QueueFull: too many wait already, or they will for too long.
        """
        state = self.state
        group = SequenceGroup(request)
        self._number(group)
        if group.uses_cache:
            group.sequences[0].block_hashes = names = list(hashes)
            if names:
                group.num_uncached_tokens -= self.num_cached_tokens(names)
        admission.check_queue(state, request.arrival, request.priority, group)
        if request.beam is not None:
            group.beam = beam.BeamSearch(request)
        state.hold(group)
        state.enqueue(group)
        if request.resumed:
            state.suspects.add(group)
        self._watch_deadline(group)
        for seq in group.live:
            results.finish_if_complete(state, seq)
        return group

    def check_room(self, now: float, priority: int) -> None:
        """Say early whether a request that comes now would be refused, however small it is.

        Raises:  QueueFull: too many wait already, or it will for too long.
        """
        admission.check_queue(self.state, now, priority)

    def cancel(self, request_id: str) -> bool:
        """End all choices of a request; False if there is no such live request."""
        group = self.state.groups.get(request_id)
        if group is None:
            return False
        self.state.counters.num_cancelled += 1
        self.state.abandon(group, FinishReason.CANCELLED)
        return True

    def stop(self, request_id: str, sample_index: int) -> bool:
        """End one choice because its text is complete; False if it is not live.

        No text is complete before the samples have forked, so until then none is stopped.
        """
        group = self.state.groups.get(request_id)
        for seq in group.live if group is not None and not group.unforked else ():
            if seq.sample_index == sample_index:
                self.state.finish(seq, FinishReason.STOP)
                return True
        return False

    @property
    def has_requests(self) -> bool:
        """A request is waiting, running or preempted."""
        return bool(self.state.groups)

    def take_outcome(self) -> Outcome:
        """Return what has happened since the last call."""
        outcome, self.state.outcome = self.state.outcome, Outcome()
        return outcome

    # -- steps ---------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """Decide the next step.

        Args:
            now: seconds, on the clock of arrivals and deadlines.
        Returns: the plan, to be executed in order; None if there is nothing to do now.
        """
        state = self.state
        if len(state.in_flight) >= state.config.max_steps_in_flight:
            return None
        state.now = now
        if self._deadlines:
            self._expire(now)
        self._decode()
        num_decodes = len(state.decode_set.members)
        budget = state.config.max_num_batched_tokens - num_decodes - len(state.chunks)
        if state.prefilling:
            budget = prefill.prefill(state, budget)
        admission.admit(state, budget, now)
        return self._seal()

    def apply(self, result: StepResult) -> None:
        """Take in the result of the oldest step in flight."""
        state = self.state
        record = state.in_flight.popleft()
        assert record.step_id == result.step_id, "results come in the order of plans"
        assert len(record.sampled) == len(result.tokens), "one token for every row that sampled"
        num_prefilled = results.take(state, record, result)
        self.costs.observe(
            result.timings,
            num_prefilled=num_prefilled,
            num_decodes=record.num_tokens - num_prefilled,
            num_moved_blocks=record.num_moved_blocks,
        )

    def name_blocks(self) -> None:
        """Do now, in a pause, what would come in the way of a later step.

        For the time after a plan is sent: the executor computes, and nothing waits.
        """
        self.state.blocks.name_blocks()

    def fail(self, error: StepError) -> None:
        """Take in that the oldest step in flight failed as a whole.

        The executor has forgotten its rows, so `restart` must follow. Every request of the
        step is suspected. Suspects come back one at a time (admission.py), until they drew
        a token. So if a step fails again, the suspect in it is to blame and is given up;
        those that ran beside it are suspected in their turn. Lack of memory is nobody's
        fault: only who saw it `_MAX_FAILURES` times, however few ran beside, is given up.
        """
        recovery.note_loss(self.state, error.message)
        recovery.blame_failure(self.state, error)

    def lose(self, reason: str, *, is_silent: bool) -> None:
        """Take in that the executor is gone, with what it had in flight.

        `restart` or `evacuate` must follow.

        Args:
            reason: what it looked like.
            is_silent: it died without a word, so what it had in flight may be to blame.
        """
        recovery.note_loss(self.state, reason)
        if is_silent:
            recovery.blame_death(self.state, reason)
        self.state.in_flight.clear()

    def restart(self, config: CoreConfig) -> None:
        """Go on with an executor that has forgotten everything (a new claim).

        Every group that ran comes back by recompute, in its old place; samples of steps
        that were in flight are lost and will be drawn again, the same ones. What does not
        fit the new pool any more ends with an error, instead of waiting for ever.
        """
        recovery.restart(self.state, config)

    def evacuate(self) -> list[SequenceGroup]:
        """Give every group up for another core to adopt; this one is then empty.

        A stream of plans that is still open must end: its executor knows the old rows.
        """
        self._deadlines.clear()
        return recovery.evacuate(self.state)

    def adopt(self, group: SequenceGroup) -> None:
        """Take in a group that another core evacuated, whatever the length of the queue.

        Raises:
            DuplicateRequest: a live request has the same id.
            NeverFits: it could not run even alone.
        """
        self._number(group)
        self._watch_deadline(group)
        recovery.adopt(self.state, group)

    def can_hold(self, group: SequenceGroup) -> bool:
        """Whether `adopt` would take a group in, alone if need be."""
        return admission.misfit(self.state, group) is None

    def expire(self, now: float) -> None:
        """End requests whose deadline has passed; `plan` does so by itself."""
        if self._deadlines:
            self._expire(now)

    def num_cached_tokens(self, hashes: list[bytes]) -> int:
        """How many tokens of a prompt the prefix cache has, by the hashes of its blocks."""
        blocks = self.state.blocks
        blocks.name_blocks()
        known = takewhile(lambda name: blocks.pool.lookup(name) is not None, hashes)
        return sum(1 for _ in known) * blocks.block_size

    # -- phases --------------------------------------------------------------------

    def _decode(self) -> None:
        """Phases 1 and 2: room for those that must grow, then one token for everyone."""
        state = self.state
        if state.decode_set_changed:
            state.refresh_decode_set([])
        state.num_owed_blocks = 0
        due = state.take_due()
        if due or state.ready or state.starved or state.preempted or len(state.waiting):
            self._make_room(due)
        state.clock.num_steps += 1

    def _make_room(self, due: list[Sequence]) -> None:
        """Preempt as needed, and only then let sequences grow: no victim is in the plan."""
        state = self.state
        candidates = state.ready
        for seq in due:
            if seq.num_scheduled >= seq.limit:
                state.leave_decode_set(seq)  # its last token is on its way
            else:
                candidates.append(seq)
        room = preemption.make_room_to_grow(state, candidates, self.costs)
        starved, state.starved = state.starved, None
        if starved is not None and starved.group.status is GroupStatus.RUNNING:
            preemption.make_room(state, starved.group, room.num_blocks + 1, self.costs)
        admission.make_room_for_urgent(state, self.costs)
        state.num_owed_blocks = room.num_owed_blocks
        state.ready = [s for s in room.stalled if s.group.status is GroupStatus.RUNNING]
        for seq in state.ready:
            state.leave_decode_set(seq)
        entering = []
        for seq in room.granted:
            if seq.group.status is not GroupStatus.RUNNING:
                continue
            if seq.group.beam is not None:
                beam.begin_step(state, seq)
            self._grow_by_one(seq)
            if seq.group.beam is not None:
                self._compute_beam(seq)
                continue
            state.set_horizon(seq)
            if not seq.in_decode_set:
                entering.append(seq)
        state.refresh_decode_set(entering)

    def _compute_beam(self, seq: Sequence) -> None:
        """A beam computes its one new token as a chunk: what comes next is not its choice."""
        state = self.state
        assert seq.row is not None
        state.plan.chunk_rows.append(seq.row)
        state.plan.chunk_counts.append(1)
        state.chunks.append((seq, seq.num_scheduled, 1))
        state.sampling.append(seq)
        seq.num_scheduled += 1

    def _grow_by_one(self, seq: Sequence) -> None:
        state, plan = self.state, self.state.plan
        assert seq.row is not None
        block = state.blocks.grow_by_block(seq)
        if block is not None:
            plan.append_rows.append(seq.row)
            plan.append_blocks.append(block)
            return
        growth = state.blocks.grow(seq, 1, plan.step_id)
        if growth.copied is not None:
            logical, source, copy = growth.copied
            plan.replacements.append((seq.row, logical, copy))
            plan.copy_sources.append(source)
            plan.copy_destinations.append(copy)
            state.counters.num_copied_blocks += 1

    def _seal(self) -> StepPlan | None:
        """Freeze the plan and remember what its result will mean."""
        state = self.state
        plan = state.plan
        plan.num_decodes = len(state.decode_set.members)
        if not plan.has_work:
            return None
        for start in plan.starts:
            start.row = start.sequence.row or 0
            start.tokens = list(start.sequence.tokens)
            start.blocks = list(start.sequence.block_table)
        decode_set = state.decode_set
        sampled, rows = decode_set.members, decode_set.rows
        if state.sampling:
            sampled = sorted([*sampled, *state.sampling], key=row_of)
            rows = [row_of(s) for s in sampled]
        moved = len(plan.swap_out_device_blocks) + len(plan.swap_in_host_blocks)
        # Who needs more than a plain step next time fills a block, or is at its length.
        next_due = state.due.get(state.clock.num_steps, ())
        at_border = [*(s for s in next_due if s.in_decode_set), *state.sampling]
        state.in_flight.append(
            StepRecord(
                plan.step_id,
                sampled,
                rows,
                at_border,
                state.chunks,
                plan.chunk_rows,
                plan.num_tokens,
                moved,
                None if state.sampling else decode_set,
            )
        )
        state.chunks, state.sampling = [], []
        state.plan = StepPlan(step_id=plan.step_id + 1)
        state.counters.num_steps += 1
        if plan.step_id % _ACCOUNT_EVERY_STEPS == 0:
            self._account()
        return plan

    # -- the rest ------------------------------------------------------------------

    def _number(self, group: SequenceGroup) -> None:
        """Give a group its place in line, if it may come here at all."""
        if group.request.request_id in self.state.groups:
            raise DuplicateRequest(f"request_id {group.request.request_id!r} is in use")
        misfit = admission.misfit(self.state, group)
        if misfit is not None:
            raise NeverFits(misfit)
        self._serial += 1
        group.serial = self._serial
        # Log-probabilities of a prompt need every position computed.
        is_cacheable = group.request.use_cache and group.request.num_prompt_logprobs is None
        group.uses_cache = self.state.config.prefix_cache and is_cacheable
        shared = group.uses_cache
        group.lineage = prefix_cache.lineage(group.request) if shared else group.serial
        group.key = self.state.key(group)

    def _watch_deadline(self, group: SequenceGroup) -> None:
        deadline = group.request.deadline
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, group.serial, group))
            self._forget_deadlines_met()

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            group = heapq.heappop(self._deadlines)[2]
            if group.live:
                self.state.abandon(group, FinishReason.CANCELLED, "deadline passed")

    def _forget_deadlines_met(self) -> None:
        """Drop finished groups before their deadline, once they outnumber the live ones."""
        if len(self._deadlines) > 2 * len(self.state.groups) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].live]
            heapq.heapify(self._deadlines)

    def _account(self) -> None:
        """Add to the running mean of how well the allocated slots are used."""
        state = self.state
        block_size = state.blocks.block_size
        allocated = state.blocks.pool.num_referenced * block_size
        waste = table_blocks = 0
        for group in state.running:
            for seq in group.sequences:
                table_blocks += len(seq.block_table)
                waste += (
                    len(seq.block_table) * block_size - seq.num_scheduled if seq.block_table else 0
                )
        state.counters.allocated_slot_steps += allocated
        state.counters.live_slot_steps += allocated - waste
        saved = table_blocks + state.blocks.num_fenced - state.blocks.pool.num_referenced
        state.counters.saved_block_steps += max(0, saved)
