"""Beam search inside the engine: fork the beams that go on, free those that end.

Each step every live beam reports its likeliest next tokens with log-probabilities. When
all have, the best continuations over all beams are ranked together:

    a continuation that ends (stop token, or the length) is a finished hypothesis if it
    ranks among the first `width`; its score is sum(logprobs) / length ** penalty
    the best `width` that do not end are the beams of the next step

A parent's first child goes on in the parent's own row and blocks; each further child
forks: it shares all blocks, and copy-on-write separates them when both write. The
convention of scores, ranks and early stopping is that of Hugging Face's beam search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_svc.core.request import FinishReason, Request, TokenLogprob
from scheduler_svc.core.sequence import GroupStatus, Sequence, SequenceGroup
from scheduler_svc.core.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam: its output tokens, its penalized score, and why it ended."""

    tokens: list[int]
    score: float
    cumulative_logprob: float
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam and the token that it goes on with."""

    parent: Sequence
    token: int
    cumulative_logprob: float


class BeamSearch:
    """Scores of one group's search; touches no blocks.

    Invariant: at most `width` finished hypotheses are kept, best first.
    """

    def __init__(self, request: Request) -> None:
        """Start without hypotheses."""
        assert request.beam is not None
        self.params = request.beam
        self.request = request
        self.finished: list[Hypothesis] = []
        self.candidates: dict[Sequence, tuple[TokenLogprob, ...]] = {}

    @property
    def num_candidates(self) -> int:
        """Tokens that each beam must report, so that enough remain if the best ones end."""
        return max(2, 1 + len(self.request.stop_token_ids)) * self.params.width

    def rank(self) -> list[Continuation]:
        """Return the continuations of all beams, best first."""
        every = [
            Continuation(seq, c.token_id, seq.cumulative_logprob + c.logprob)
            for seq, candidates in self.candidates.items()
            for c in candidates
        ]
        every.sort(key=lambda c: -c.cumulative_logprob)
        return every[: self.num_candidates]

    def select(self) -> list[Continuation]:
        """Move what ends to the finished hypotheses.

        Returns: the beams of the next step; none if the search is over.
        """
        width = self.params.width
        going_on: list[Continuation] = []
        for rank, candidate in enumerate(self.rank()):
            reason = self._end_reason(candidate)
            if reason is None:
                going_on.append(candidate)
            elif rank < width:
                self._keep(candidate, reason)
        del going_on[width:]
        return [] if self._is_over(going_on) else going_on

    def _length(self, candidate: Continuation) -> int:
        return candidate.parent.num_output_tokens + 1

    def _score(self, candidate: Continuation) -> float:
        length = float(self._length(candidate))
        return candidate.cumulative_logprob / math.pow(length, self.params.length_penalty)

    def _end_reason(self, candidate: Continuation) -> FinishReason | None:
        if candidate.token in self.request.stop_token_ids:
            return FinishReason.STOP
        if self._length(candidate) >= self.request.max_tokens:
            return FinishReason.LENGTH
        return None

    def _keep(self, candidate: Continuation, reason: FinishReason) -> None:
        parent = candidate.parent
        tokens = [*parent.tokens[parent.num_prompt_tokens :], candidate.token]
        self.finished.append(
            Hypothesis(tokens, self._score(candidate), candidate.cumulative_logprob, reason)
        )
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self.params.width :]

    def _is_over(self, going_on: list[Continuation]) -> bool:
        if not going_on:
            return True
        if len(self.finished) < self.params.width:
            return False
        return self.params.early_stopping or self._score(going_on[0]) <= self.finished[-1].score


def collect(
    state: SchedulerState,
    group: SequenceGroup,
    candidates: Mapping[Sequence, tuple[TokenLogprob, ...]],
) -> None:
    """Take beams' candidates; when every live beam has reported, go on to the next step."""
    search = group.beam
    assert search is not None
    search.candidates.update(candidates)
    live = group.live
    if all(seq in search.candidates for seq in live):
        children = search.select()
        search.candidates.clear()
        if children:
            _branch(state, group, children)
        else:
            state.outcome.hypotheses.append((group, search.finished[: group.request.n]))
            for seq in live:
                state.finish(seq, FinishReason.STOP, is_reported=False)


def _branch(state: SchedulerState, group: SequenceGroup, children: list[Continuation]) -> None:
    """Replace the group's beams by these."""
    parents = {c.parent for c in children}
    for seq in group.live:
        if seq not in parents:
            state.finish(seq, FinishReason.STOP, is_reported=False)
    group.sequences = [seq for seq in group.sequences if seq in parents]
    before = {seq: list(seq.tokens) for seq in parents}
    for child in children:
        seq = child.parent
        if seq in before and len(seq.tokens) > len(before[seq]):
            seq = _fork(state, child.parent, before[child.parent])
            group.sequences.append(seq)
        seq.tokens.append(child.token)
        seq.cumulative_logprob = child.cumulative_logprob
    for index, seq in enumerate(group.sequences):
        seq.sample_index = index
    if group.status is GroupStatus.RUNNING:
        state.ready += group.sequences


def _fork(state: SchedulerState, parent: Sequence, tokens: list[int]) -> Sequence:
    """Make a beam with the parent's blocks; it gets its row with its first step."""
    child = Sequence(parent.group, 0, list(tokens))
    state.blocks.fork(parent, child)
    child.num_scheduled, child.num_computed = parent.num_scheduled, parent.num_computed
    child.is_prefilled = parent.is_prefilled
    child.share_from = parent
    return child


def begin_step(state: SchedulerState, seq: Sequence) -> None:
    """Tell the executor which token the beam goes on with, and in which row."""
    parent = seq if seq.row is not None else seq.share_from
    assert parent is not None and parent.row is not None
    row = seq.row if seq.row is not None else state.take_row(seq)
    seq.share_from = None
    if len(seq.tokens) > seq.num_prompt_tokens:
        state.plan.children.append((parent.row, row, seq.tokens[-1]))
