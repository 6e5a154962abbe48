"""The scheduler core against the modelled executor, checked after every transition.

One harness serves the Hypothesis state machine, the random driver, the exploration of
all interleavings and the unit tests. A transition is one call of the core. After each:

    the core's invariants hold
    the executor model read only right slots, and its rows are what the core believes
    no block came into a table while a step in flight still touched it
    every choice has at most one end, and no token after it

and `check_finished` compares every output with the oracle.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field, replace

from scheduler_svc.core import invariants
from scheduler_svc.core.events import Event, EventKind
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import GroupStatus
from scheduler_svc.core.state import CoreConfig
from scheduler_svc.core.step import StepError, StepErrorKind, StepPlan, StepResult
from scheduler_svc.errors import NeverFits, QueueFull
from tests.support.executor_model import (
    ExecutorModel,
    Footprint,
    expected_hypotheses,
    expected_output,
)


@dataclass
class Totals:
    """What all harnesses of this process did together."""

    transitions: int = 0
    checked_reads: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


TOTALS = Totals()

Choice = tuple[str, int]


class CoreHarness:
    """A core, a modelled executor, and what a client would have seen."""

    def __init__(self, config: CoreConfig) -> None:
        self.now = 0.0
        self.num_transitions = 0
        self.requests: dict[str, Request] = {}
        self.tokens: dict[Choice, list[int]] = {}
        self.num_logprobs: dict[Choice, int] = {}
        self.prompt_logprobs: dict[str, list[int]] = {}
        self.ends: dict[Choice, FinishReason] = {}
        self.errors: dict[Choice, str] = {}
        self.hypotheses: dict[str, list] = {}
        self.admitted: list[str] = []
        self.events: dict[str, list[Event]] = {}
        # Where each group must be, by what was told of it.
        self.places: dict[str, GroupStatus] = {}
        self.interrupted: set[str] = set()
        self.stopped: set[Choice] = set()
        self._begin(config, Scheduler(config))

    def beside(self, config: CoreConfig) -> CoreHarness:
        """Another core and executor that serve the same clients."""
        twin = copy.copy(self)
        twin.num_transitions = 0
        twin._begin(config, Scheduler(config))
        return twin

    def _begin(self, config: CoreConfig, core: Scheduler) -> None:
        self.config = config
        self.core = core
        self.model = ExecutorModel(
            config.num_blocks, config.block_size, config.num_host_blocks, config.max_num_seqs
        )
        self.pending: deque[tuple[StepPlan, StepResult, Footprint]] = deque()

    # -- transitions ---------------------------------------------------------------

    def add(self, request: Request) -> bool:
        """Add a request; False if the core refuses it."""
        self.now = max(self.now, request.arrival)
        try:
            self.core.add(request)
        except (NeverFits, QueueFull):
            assert request.request_id not in self.core.state.groups
            self._after()
            return False
        self.requests[request.request_id] = request
        self._after()
        return True

    def plan(self) -> StepPlan | None:
        """Plan a step and execute it at once; its result is applied later."""
        expired = [
            r.request_id
            for r in self.requests.values()
            if r.deadline is not None and r.deadline <= self.now
        ]
        self.interrupted.update(i for i in expired if i in self.core.state.groups)
        plan = self.core.plan(self.now)
        if plan is None:
            if not self.pending:
                assert not self.core.has_requests, "nothing in flight, and nothing planned"
        else:
            result = self.model.run(plan)
            self._check_budget(plan)
            self._check_fences(self.model.footprint)
            self.pending.append((plan, result, self.model.footprint))
            self._check_rows()
        self._after()
        return plan

    def apply(self) -> StepPlan | None:
        """Apply the oldest result; returns its plan."""
        if not self.pending:
            return None
        plan, result, _ = self.pending.popleft()
        self.core.apply(result)
        self._after()
        return plan

    def cancel(self, request_id: str) -> bool:
        """Cancel a request, known or not."""
        is_live = request_id in self.core.state.groups
        assert self.core.cancel(request_id) == is_live
        if is_live:
            self.interrupted.add(request_id)
            assert request_id not in self.core.state.groups
        self._after()
        return is_live

    def stop(self, request_id: str, index: int) -> bool:
        """Stop a choice as if its text were complete; only one that has tokens."""
        if not self.tokens.get((request_id, index)):
            return False
        is_stopped = self.core.stop(request_id, index)
        if is_stopped:
            self.stopped.add((request_id, index))
        self._after()
        return is_stopped

    def advance(self, seconds: float) -> None:
        """Let time pass; what is overdue ends with the next plan."""
        self.now += seconds

    def restart(self, config: CoreConfig | None = None) -> None:
        """Lose the executor and claim another one."""
        before = set(self.core.state.groups)
        self.core.restart(config or self.config)
        self.interrupted.update(before - set(self.core.state.groups))
        self._begin(config or self.config, self.core)
        self._after()

    def die(self) -> None:
        """Lose the executor without a word, and claim it again."""
        before = set(self.core.state.groups)
        self.core.lose("it died", is_silent=True)
        self.interrupted.update(before - set(self.core.state.groups))
        self.restart()

    def move_to(self, other: CoreHarness, *, died: bool) -> None:
        """Lose the executor or leave it; what the other core can hold goes on there."""
        before = set(self.core.state.groups)
        self.core.lose("it died" if died else "it left", is_silent=died)
        self.interrupted.update(before - set(self.core.state.groups))
        self._take_outcome()
        groups = self.core.evacuate()
        assert not self.core.has_requests and self.core.plan(self.now) is None
        invariants.check(self.core.state)
        for group in groups:
            home = other if other.core.can_hold(group) else self
            home.core.adopt(group)
        self._begin(self.config, self.core)
        other.now = self.now = max(self.now, other.now)
        self._after()
        other._after()

    def fail(self, kind: StepErrorKind = StepErrorKind.INTERNAL) -> None:
        """Let the oldest step in flight fail, and claim the executor again."""
        if not self.pending:
            return
        before = set(self.core.state.groups)
        self.core.fail(StepError(kind, "made up"))
        self.interrupted.update(before - set(self.core.state.groups))
        self.restart()

    # -- many transitions ----------------------------------------------------------

    def step(self) -> StepPlan | None:
        """Plan and apply one step, with nothing else in flight."""
        while self.pending:
            self.apply()
        plan = self.plan()
        self.apply()
        return plan

    def drain(self) -> int:
        """Plan and apply until every request is done; bounded, so it cannot hang.

        Returns: how many steps it took.
        """
        work = sum(
            (len(r.prompt_tokens) + r.max_tokens + 4) * (r.beam.width if r.beam else r.best_of)
            for r in self.requests.values()
            if r.request_id in self.core.state.groups
        )
        bound = 100 + 20 * work
        num_steps = 0
        while self.core.has_requests or self.pending:
            while self.plan() is not None:
                num_steps += 1
            self.apply()
            assert num_steps <= bound, "too many steps: groups push each other out"
        return num_steps

    # -- checks --------------------------------------------------------------------

    def check_finished(self) -> None:
        """After `drain`: everything is given back, every output is the oracle's."""
        state = self.core.state
        assert not self.core.has_requests and not self.pending
        assert self.plan() is None, "work is planned for nobody"
        assert not (state.running or state.preempted or state.prefilling or state.ready)
        assert not state.decode_set.members or state.decode_set_changed
        assert len(state.waiting) == 0 and state.waiting.peek() is None
        assert state.starved is None and state.num_promised_rows == 0
        assert state.blocks.num_fenced == 0 and state.blocks.pool.num_referenced == 0
        host = state.blocks.host_pool
        assert host is None or host.num_available == host.num_total
        assert set(self.model.rows) <= set(state.plan.finish_rows)
        for request in self.requests.values():
            if request.beam is not None:
                self._check_beams(request)
            else:
                for index in range(request.best_of):
                    self._check_choice(request, index)
                self._check_prompt_logprobs(request)

    def _check_choice(self, request: Request, index: int) -> None:
        choice = (request.request_id, index)
        new = self.tokens.get(choice, [])
        found = [*request.resumed.get(index, ()), *new]
        expected = expected_output(request, index)
        reason = self.ends.get(choice)
        assert reason is not None, f"{choice} never ended"
        if request.num_logprobs is not None:
            assert self.num_logprobs.get(choice, 0) == len(new)
        if choice in self.stopped or reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            assert choice in self.stopped or request.request_id in self.interrupted
            assert found == expected[: len(found)], f"{choice}: wrong tokens before its end"
            return
        assert found == expected, f"{choice}: {found} instead of {expected}"
        is_stop = bool(found) and found[-1] in request.stop_token_ids
        assert reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)

    def _check_prompt_logprobs(self, request: Request) -> None:
        told = self.prompt_logprobs.get(request.request_id, [])
        was_complete = all(
            list(request.resumed.get(i, ())) == expected_output(request, i) and request.max_tokens
            for i in range(request.best_of)
        )
        if request.num_prompt_logprobs is None or was_complete:
            assert not told
        elif request.request_id in self.interrupted:
            assert told == request.prompt_tokens[1 : 1 + len(told)]
        else:
            assert told == request.prompt_tokens[1:], "each position once, in order"

    def _check_beams(self, request: Request) -> None:
        found = self.hypotheses.get(request.request_id)
        if found is None:
            assert request.request_id in self.interrupted
            return
        expected = expected_hypotheses(request)
        assert [h.tokens for h in found] == [h.tokens for h in expected]
        assert [h.reason for h in found] == [h.reason for h in expected]
        for a, b in zip(found, expected, strict=True):
            assert abs(a.score - b.score) < 1e-9

    def _after(self) -> None:
        """Look at the core after a transition."""
        self.num_transitions += 1
        invariants.check(self.core.state)
        self._take_outcome()
        for name, group in self.core.state.groups.items():
            told = self.places.get(name, GroupStatus.WAITING)
            assert group.status is told, f"{name} is {group.status}, and was told to be {told}"

    def _follow(self, event: Event) -> None:
        """Events tell, one after the other, where a group is."""
        name = event.group.request.request_id
        self.events.setdefault(name, []).append(event)
        place = self.places.get(name, GroupStatus.WAITING)
        assert event.other_request_id in ("", *self.requests)
        match event.kind:
            case EventKind.PREEMPTED_RECOMPUTE:
                assert place in (GroupStatus.RUNNING, GroupStatus.SWAPPED)
                place = GroupStatus.PREEMPTED
            case EventKind.PREEMPTED_SWAP:
                assert place is GroupStatus.RUNNING
                place = GroupStatus.SWAPPED
            case EventKind.SWAPPED_IN:
                assert place is GroupStatus.SWAPPED
                place = GroupStatus.RUNNING
            case EventKind.RESUMED:
                assert place is GroupStatus.PREEMPTED
                place = GroupStatus.RUNNING
            case EventKind.EXECUTOR_LOST:
                assert place is not GroupStatus.WAITING
                place = GroupStatus.PREEMPTED
            case EventKind.MOVED:
                if place is not GroupStatus.WAITING:
                    place = GroupStatus.PREEMPTED
            case EventKind.BLOCKED:
                assert place is not GroupStatus.RUNNING and event.detail
        self.places[name] = place

    def _take_outcome(self) -> None:
        outcome = self.core.take_outcome()
        assert len(outcome.sampled) == len(outcome.tokens)
        for group in outcome.admitted:
            assert group.request.request_id not in self.admitted, "admitted twice"
            self.admitted.append(group.request.request_id)
            self.places[group.request.request_id] = GroupStatus.RUNNING
        for event in outcome.events:
            self._follow(event)
        for seq, token in zip(outcome.sampled, outcome.tokens, strict=True):
            choice = (seq.group.request.request_id, seq.sample_index)
            assert choice not in self.ends, f"{choice}: a token after its end"
            self.tokens.setdefault(choice, []).append(token)
        for seq, logprobs in outcome.logprobs:
            choice = (seq.group.request.request_id, seq.sample_index)
            if logprobs.sampled is not None:
                self.num_logprobs[choice] = self.num_logprobs.get(choice, 0) + 1
            told = self.prompt_logprobs.setdefault(choice[0], [])
            told += [entry.chosen.token_id for entry in logprobs.prompt]
        for seq in outcome.finished:
            choice = (seq.group.request.request_id, seq.sample_index)
            assert seq.finish_reason is not None
            if seq.group.beam is None:
                assert choice not in self.ends, f"{choice}: a second end"
            self.ends[choice] = seq.finish_reason
        for seq, message in outcome.errors.items():
            self.errors[seq.group.request.request_id, seq.sample_index] = message
        for group, found in outcome.hypotheses:
            assert group.request.request_id not in self.hypotheses, "two results of a search"
            self.hypotheses[group.request.request_id] = found

    def _check_budget(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(self.core.state.in_flight) <= self.config.max_steps_in_flight

    def _check_fences(self, footprint: Footprint) -> None:
        """A block may come into a table only when no step in flight touches it."""
        for _, _, other in self.pending:
            assert other.touched.isdisjoint(footprint.taken), "a fenced block was handed out"
            assert other.touched_host.isdisjoint(footprint.taken_host)

    def _check_rows(self) -> None:
        """The deltas have brought the executor to where the core believes it is."""
        held = {}
        for group in self.core.state.groups.values():
            for seq in group.live:
                if seq.row is None:
                    continue
                row = held[seq.row] = self.model.rows[seq.row]
                assert row.num_computed == seq.num_scheduled, f"{seq}: {row.num_computed}"
                if group.status is GroupStatus.RUNNING:
                    assert row.table == seq.block_table, f"{seq}: another table"
        assert held.keys() == self.model.rows.keys(), "rows that the core does not know"

    def report(self) -> None:
        """Add this harness to the totals of the process."""
        TOTALS.transitions += self.num_transitions
        TOTALS.checked_reads += self.model.num_checked_reads
        for name, value in self.core.state.counters.as_dict().items():
            TOTALS.counters[name] = TOTALS.counters.get(name, 0) + value


def smaller(config: CoreConfig, **changes: int) -> CoreConfig:
    """The same configuration with other limits."""
    return replace(config, **changes)
