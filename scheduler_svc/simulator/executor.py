"""A modelled executor under the real scheduler core: when its steps are over, and what they drew.

It is to the core what a session and an executor are together in service: up to two steps in
flight, the second begins where the first ends, results are applied in order, and the next
step is planned then and whenever a request comes. Steps have a modelled duration, and tokens
without meaning: a sequence's first token is one that no other sequence has, so that samples of
one prompt do not look alike to the prefix cache, and all others are the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import GroupStatus, Sequence, SequenceGroup
from scheduler_svc.core.state import CoreConfig, Outcome
from scheduler_svc.core.step import DecodeSet, StepPlan, StepRecord, StepResult, StepTimings
from scheduler_svc.simulator.agenda import Agenda
from scheduler_svc.simulator.beams import BeamCandidates
from scheduler_svc.simulator.meter import Meter
from scheduler_svc.simulator.work import StepCost, StepWork
from scheduler_svc.simulator.workload import FIRST_OF_OUTPUT

_KV_SAMPLE_STEPS = 8
_KV_SAMPLE_ALL_BELOW = 256
_OUTPUT_IDS = 1 << 29
_OTHER_TOKEN = 1
_NO_TIMINGS = StepTimings()
_BAD_ENDS = (FinishReason.ERROR, FinishReason.CANCELLED)


@dataclass(slots=True)
class SchedulerCpu:
    """One scheduler process: it does one thing at a time.

    Attributes:
        step_seconds: CPU time of a step, for planning it and for its result.
        free_at: when what it has to do is done.
    """

    step_seconds: float
    free_at: float = 0.0

    def occupy(self, now: float) -> float:
        """Do a step's work after all that came before; returns when it is done."""
        self.free_at = max(now, self.free_at) + self.step_seconds
        return self.free_at


class SimExecutor:
    """One executor and the core that plans for it.

    Invariant: while it is alive every step in flight has an act on the agenda; acts of an
    earlier life are told by their epoch and do nothing.

    Attributes:
        core: the real one.
        is_alive: steps come to their end.
        takes_requests: new work may go here; a dead one does until its death is noticed.
        slowdown: factor on the durations of steps.
    """

    def __init__(
        self,
        index: int,
        config: CoreConfig,
        cost: StepCost,
        *,
        agenda: Agenda,
        meter: Meter,
        beams: BeamCandidates,
        note_end: Callable[[], None],
        cpu: SchedulerCpu | None = None,
        slowdown: float = 1.0,
        wire_seconds: float = 0.0,
    ) -> None:
        """Start idle.

        Args:
            index: tells executors apart.
            config: of the core.
            cost: of its steps.
            agenda: where ends of steps are booked.
            meter: is told what happens.
            beams: what beam searches are told.
            note_end: called for each request that ends, well or not.
            cpu: of its scheduler; None: planning takes no time.
            slowdown: factor on the durations of steps.
            wire_seconds: one way between scheduler and executor.
        """
        self.index = index
        self.core = Scheduler(config)
        self.is_alive = True
        self.takes_requests = True
        self.slowdown = slowdown
        # Only this choice is made by how long steps took.
        self._is_timed = config.preemption == "auto"
        self._cost = cost
        self._agenda = agenda
        self._meter = meter
        self._beams = beams
        self._note_end = note_end
        self._cpu = cpu
        self._wire = wire_seconds
        self._epoch = 0
        self._is_woken = False
        self._num_firsts = index * 7_919  # not another executor's numbers, for a while
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        self._free_at = now
        self._timings: deque[StepTimings] = deque()
        # The decode set of the last step planned, and what its members attend to.
        self._decode_set: DecodeSet | None = None
        self._context = 0
        # Members of this set all had their last token then; it is written to them when
        # the set changes, so that a steady step touches no sequence.
        self._steady: DecodeSet | None = None
        self._steady_at = now
        self._unsampled_seconds = 0.0
        self._steps_to_sample = 1

    # -- what placement and the fleet use ------------------------------------------

    @property
    def load_tokens(self) -> int:
        """Tokens still to be computed for the requests here, at most."""
        return self.core.state.load_tokens

    def wake(self) -> None:
        """Look for work once all that happens now has happened."""
        if not self._is_woken:
            self._is_woken = True
            self._agenda.book(self._agenda.now, self._rouse)

    def _rouse(self, now: float, _: int) -> None:
        self._is_woken = False
        self.plan(now)

    def die(self, now: float) -> None:
        """Stop in the middle of everything; nobody knows yet."""
        self.is_alive = False
        self._epoch += 1
        self._flush_steady()
        self._begin(now)

    def lose(self, now: float) -> None:
        """Let the core know of the death."""
        self.takes_requests = False
        self.core.lose("it died", is_silent=True)
        self.deliver(now, None)

    def leave(self, now: float) -> None:
        """End in good order, at once: what was in flight is not taken in."""
        self.deliver(now, None)
        self.takes_requests = False
        self.die(now)

    def come_back(self, now: float) -> None:
        """Go on with nothing but the core's requests, as a new process."""
        self._begin(now)
        self.core.restart(self.core.state.config)
        self.is_alive = self.takes_requests = True
        self.deliver(now, None)
        self.plan(now)

    # -- steps ---------------------------------------------------------------------

    def plan(self, now: float) -> None:
        """Plan steps until enough are in flight or there is nothing to do."""
        if not self.is_alive:
            return
        core = self.core
        in_flight, limit = core.state.in_flight, core.state.config.max_steps_in_flight
        while len(in_flight) < limit:
            plan = core.plan(now)
            if plan is None:
                break
            self._launch(plan, in_flight[-1], now)
        core.name_blocks()

    def _launch(self, plan: StepPlan, record: StepRecord, now: float) -> None:
        """Book the end of a step that was just planned."""
        state, num_decodes = self.core.state, plan.num_decodes
        if state.decode_set is self._decode_set:
            self._context += num_decodes
        else:
            self._decode_set = state.decode_set
            self._context = sum([seq.num_scheduled for seq in state.decode_set.members])
        work = StepWork(num_decodes, self._context, None, len(record.sampled))
        if record.chunks:
            self._add_chunks(work, record)
        work.num_swapped_blocks = record.num_moved_blocks
        work.num_copied_blocks = len(plan.copy_sources)
        forward, move = self._cost.seconds(work)
        forward *= self.slowdown
        self._free_at = end = max(now + self._wire, self._free_at) + forward
        timings = _NO_TIMINGS
        if self._is_timed:
            move_ns = int(move * self.slowdown * 1e9)
            timings = StepTimings(forward_ns=int(forward * 1e9), move_ns=move_ns)
        self._timings.append(timings)
        num_sequences = num_decodes + len(record.chunks)
        self._meter.note_step(forward, len(state.running), num_sequences, record.num_tokens)
        self._unsampled_seconds += forward
        self._steps_to_sample -= 1
        if self._steps_to_sample <= 0:
            self._sample_kv()
        self._agenda.book(end + self._wire, self._on_result, self._epoch)

    @staticmethod
    def _add_chunks(work: StepWork, record: StepRecord) -> None:
        prefills = []
        for seq, first, count in record.chunks:
            if count == 1 and seq.group.beam is not None:
                work.num_decodes += 1  # a beam's one new token
                work.decode_context += first + 1
            else:
                prefills.append((first, count))
        work.prefills = prefills

    def _on_result(self, now: float, epoch: int) -> None:
        """A step is over."""
        if epoch != self._epoch:
            return
        if self._cpu is None:
            self._take(now, epoch)
        else:
            self._agenda.book(self._cpu.occupy(now), self._take, epoch)

    def _take(self, now: float, epoch: int) -> None:
        """Apply the oldest step's result and plan on."""
        if epoch != self._epoch:
            return
        core = self.core
        record = core.state.in_flight[0]
        steady = record.decode_set
        tokens = [_OTHER_TOKEN] * len(record.sampled)
        result = StepResult(record.step_id, tokens, timings=self._timings.popleft())
        if steady is None:
            self._draw(record, result)
        core.apply(result)
        self.deliver(now, steady)
        self.plan(now)

    def _draw(self, record: StepRecord, result: StepResult) -> None:
        """Draw first tokens, which differ, and the candidates of beams."""
        for place, seq in enumerate(record.sampled):
            search = seq.group.beam
            if search is not None:
                drawn = self._beams.next(search.num_candidates)
                result.logprobs[record.rows[place]] = drawn
            elif len(seq.tokens) == seq.num_prompt_tokens:
                self._num_firsts += 1
                result.tokens[place] = FIRST_OF_OUTPUT + self._num_firsts % _OUTPUT_IDS

    # -- what happened -------------------------------------------------------------

    def deliver(self, now: float, steady: DecodeSet | None) -> None:
        """Measure what happened in the core since the last time.

        Args:
            now: simulated seconds.
            steady: the decode set, if it and nobody else drew tokens.
        """
        outcome = self.core.take_outcome()
        if steady is not None and steady is self._steady and outcome.sampled:
            self._meter.itl.add(now - self._steady_at, len(outcome.sampled))
            self._steady_at = now
        elif outcome.sampled:
            self._flush_steady()
            self._note_tokens(outcome.sampled, now)
            self._steady, self._steady_at = steady, now
        if outcome.admitted:
            admitted = self._meter.requests.admitted
            for group in outcome.admitted:
                admitted[_index(group)] = group.admitted_at or 0.0
        if outcome.finished or outcome.hypotheses:
            self._note_ends(outcome, now)

    def _flush_steady(self) -> None:
        """Tell the members of a set that is no more when they had their last token."""
        if self._steady is not None:
            for seq in self._steady.members:
                seq.told_at = self._steady_at
            self._steady = None

    def _note_tokens(self, sampled: list[Sequence], now: float) -> None:
        gaps: dict[float, int] = {}
        for seq in sampled:
            told_at, seq.told_at = seq.told_at, now
            gaps[told_at] = gaps.get(told_at, 0) + 1
            if not told_at:
                index, firsts = _index(seq.group), self._meter.requests.first_token
                if firsts[index] != firsts[index]:  # not a number: none yet
                    firsts[index] = now
        gaps.pop(0.0, None)
        for told_at, count in gaps.items():
            self._meter.itl.add(now - told_at, count)

    def _note_ends(self, outcome: Outcome, now: float) -> None:
        meter = self._meter
        for group, found in outcome.hypotheses:
            index = _index(group)
            meter.requests.first_token[index] = now
            meter.note_end(index, now, sum(len(each.tokens) for each in found))
            self._note_end()
        for group in dict.fromkeys(seq.group for seq in outcome.finished):
            if group.status is not GroupStatus.FINISHED:
                continue
            if any(seq.finish_reason in _BAD_ENDS for seq in group.sequences):
                meter.num_failed += 1
            else:
                num_tokens = sum(seq.num_output_tokens for seq in group.sequences)
                meter.note_end(_index(group), now, num_tokens)
            self._note_end()

    def _sample_kv(self) -> None:
        """Count the pool for the time since the last sample."""
        state, meter = self.core.state, self._meter
        seconds, self._unsampled_seconds = self._unsampled_seconds, 0.0
        is_new = self.core.state.counters.num_steps < _KV_SAMPLE_ALL_BELOW
        self._steps_to_sample = 1 if is_new else _KV_SAMPLE_STEPS
        pool, block_size = state.blocks.pool, state.blocks.block_size
        waste = num_held = 0
        for group in state.running:
            for seq in group.sequences:
                held = len(seq.block_table)
                if held:
                    num_held += held
                    waste += held * block_size - seq.num_scheduled
        allocated = pool.num_referenced
        meter.note_kv(
            seconds,
            pool.num_total * block_size,
            token_states=allocated * block_size - waste,
            internal=waste,
            reserved=0,
            is_waiting=bool(state.preempted) or len(state.waiting) > 0,
        )
        meter.blocks += seconds * allocated
        meter.saved_blocks += seconds * max(0, num_held + state.blocks.num_fenced - allocated)


def _index(group: SequenceGroup) -> int:
    return int(group.request.request_id)
