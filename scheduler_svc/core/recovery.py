"""After an executor failed, died or was left: who is to blame, and who goes on where.

A group is its tokens, its search, its ends and its place in line; rows, blocks and samples
in flight belong to the executor. `restart` drops the latter and goes on with the same
executor, `evacuate` and `adopt` carry groups from one core to another. What was in flight
is drawn again, the same: the scheduler has told of no token whose result it did not see.

Blame, so that one request cannot fail its neighbours for ever:

    a step that failed and says so   its requests are suspects; who is in the next such step
                                     as a suspect is given up (memory: in the third)
    a silent death of the executor   requests of the steps in flight are suspects; whom an
                                     executor died under twice, with few tokens between, while
                                     no other was in question is given up

Suspects run one at a time (admission.py) until they drew a token. A request that resumes is
one as well: an executor may have died under it at another scheduler.
"""

from __future__ import annotations

from scheduler_svc.core import admission
from scheduler_svc.core.events import EventKind
from scheduler_svc.core.request import FinishReason
from scheduler_svc.core.sequence import GroupStatus, SequenceGroup
from scheduler_svc.core.state import CoreConfig, SchedulerState
from scheduler_svc.core.step import StepError, StepErrorKind

_MAX_OUT_OF_MEMORY = 3
_MAX_DEATHS = 2
_INNOCENT_TOKENS = 64
"""Who has drawn so many tokens since an executor died under it was not the reason."""


def note_loss(state: SchedulerState, reason: str) -> None:
    """Tell every group that has run that its executor is lost to it; once."""
    if state.is_loss_told:
        return
    state.is_loss_told = True
    for group in (*state.running, *state.preempted):
        num_tokens = sum(len(seq.tokens) for seq in group.live)
        state.note(EventKind.EXECUTOR_LOST, group, detail=reason, num_tokens=num_tokens)


def blame_failure(state: SchedulerState, error: StepError) -> None:
    """The oldest step in flight failed and said so: suspect its groups, give up the guilty."""
    record = state.in_flight[0]
    groups = {s.group for s in record.sampled} | {s.group for s, _, _ in record.chunks}
    groups = {group for group in groups if group.live}
    suspects = groups & state.suspects
    state.in_flight.clear()
    state.suspects |= groups
    for group in groups:
        group.num_failures += 1
    if error.kind is StepErrorKind.OUT_OF_MEMORY:
        guilty = {group for group in suspects if group.num_failures >= _MAX_OUT_OF_MEMORY}
    else:
        guilty = suspects
    for group in guilty:
        state.abandon(group, FinishReason.ERROR, error.message)


def blame_death(state: SchedulerState, reason: str) -> None:
    """The executor vanished without a word: suspect those whose steps were in flight."""
    groups = {
        seq.group
        for record in state.in_flight
        for seq in (*record.sampled, *(s for s, _, _ in record.chunks))
        if not seq.is_finished
    }
    state.in_flight.clear()
    in_question = groups & state.suspects or groups
    state.suspects |= groups
    if len(in_question) != 1:
        return
    (group,) = in_question
    num_tokens = sum(len(seq.tokens) for seq in group.sequences)
    if num_tokens - group.tokens_at_death >= _INNOCENT_TOKENS:
        group.num_deaths = 0
    group.tokens_at_death = num_tokens
    group.num_deaths += 1
    if group.num_deaths >= _MAX_DEATHS:
        state.abandon(group, FinishReason.ERROR, f"executors died while they ran it: {reason}")


def restart(state: SchedulerState, config: CoreConfig) -> None:
    """Go on with an executor that has forgotten everything; see `Scheduler.restart`."""
    if config.block_size != state.config.block_size:
        _forget_hashes(list(state.groups.values()))
    note_loss(state, "it was claimed anew")
    ran = [*state.running, *state.preempted]
    state.preempted = []
    for group in ran:
        group.leave_executor()
    state.start_over(config)
    state.counters.num_resyncs += 1
    for group in ran:
        _come_back(state, group)
    for group in list(state.groups.values()):
        misfit = admission.misfit(state, group)
        if misfit is not None:
            state.abandon(group, FinishReason.ERROR, misfit)


def evacuate(state: SchedulerState) -> list[SequenceGroup]:
    """Take every group out, in order of their keys; the state is then that of a new core."""
    groups = sorted(state.groups.values(), key=lambda group: group.key)
    for group in groups:
        if group.status is not GroupStatus.WAITING:
            group.leave_executor()
        group.is_suspect = group in state.suspects
        state.release(group)
        group.num_uncached_tokens = group.num_known_tokens  # nothing is cached for it elsewhere
    _forget_hashes(groups)
    state.suspects.clear()
    state.preempted = []
    state.waiting.clear()
    state.num_waiting_tokens = 0
    state.start_over(state.config)
    return groups


def adopt(state: SchedulerState, group: SequenceGroup) -> None:
    """Take in a group that another core gave up; who ran comes before anything new."""
    state.hold(group)
    state.counters.num_adopted += 1
    known = sum(len(seq.tokens) for seq in group.live)
    state.note(EventKind.MOVED, group, num_tokens=known)
    if group.is_suspect:
        state.suspects.add(group)
    if group.status is GroupStatus.WAITING:
        state.enqueue(group)
    else:
        _come_back(state, group)


def _come_back(state: SchedulerState, group: SequenceGroup) -> None:
    group.status = GroupStatus.PREEMPTED
    group.num_preemptions += 1
    state.enqueue_preempted(group)


def _forget_hashes(groups: list[SequenceGroup]) -> None:
    """Names of blocks hold for one block size."""
    for group in groups:
        for seq in group.live:
            seq.block_hashes = []
