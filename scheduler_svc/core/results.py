"""Take in a step's result: tokens, ends, log-probabilities, settled blocks.

A sequence may have moved on while its step was in flight. It was finished: the token is
discarded, it was one too many. It was preempted or swapped: the token is kept, for that
step did compute it.
"""

from __future__ import annotations

from scheduler_svc.core import beam
from scheduler_svc.core.request import FinishReason, TokenLogprob
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step import RowLogprobs, StepRecord, StepResult, StepTimings


def take(state: SchedulerState, record: StepRecord, result: StepResult) -> int:
    """Bring the state up to date with the oldest step's result.

    Returns: how many tokens the step prefilled.
    """
    state.blocks.settle(record.step_id)
    state.blocks.name_blocks()  # of the step before, had there been no pause since
    num_prefilled = 0
    for seq, first, count in record.chunks:
        if seq.group.beam is None or first < seq.num_prompt_tokens:
            num_prefilled += count  # otherwise it is a beam's one new token
        if seq.row is not None:
            seq.num_computed += count
            _note_computed(state, seq)
    state.counters.num_prompt_tokens += num_prefilled
    if result.row_errors or result.logprobs:
        _take_extras(state, record, result)
    _take_tokens(state, record, result.tokens)
    if state.suspects:
        state.suspects.difference_update(s.group for s in record.sampled)
    if state.config.policy == "fair":
        _charge(state, record)
    _count_time(state, result.timings)
    return num_prefilled


def find_fault(state: SchedulerState, result: StepResult, vocab_size: int) -> str | None:
    """Say what is wrong with a result, before any of it is taken in; None if nothing is.

    `vocab_size` is the executor's, in tokens; 0 is not known.

    An executor that answers so cannot be trusted any further, but the core still can.
    """
    record = state.in_flight[0] if state.in_flight else None
    if record is None or record.step_id != result.step_id:
        due = "none" if record is None else str(record.step_id)
        return f"it answered step {result.step_id} where {due} was due"
    if result.error is not None:
        return None
    if len(result.tokens) != len(record.sampled):
        return f"{len(result.tokens)} tokens came for {len(record.sampled)} rows that sampled"
    if vocab_size and result.tokens and max(result.tokens) >= vocab_size:
        return f"token {max(result.tokens)} came, of a vocabulary of {vocab_size}"
    if record.decode_set is None:
        for seq, row in zip(record.sampled, record.rows, strict=True):
            if _lacks_candidates(seq, result.logprobs.get(row)) and row not in result.row_errors:
                return f"row {row} of a beam search came with no candidates"
    return None


def _lacks_candidates(seq: Sequence, logprobs: RowLogprobs | None) -> bool:
    search = seq.group.beam
    if search is None or seq.is_finished:
        return False
    position = logprobs.sampled if logprobs is not None else None
    return position is None or not position.top


def finish_if_complete(state: SchedulerState, seq: Sequence) -> None:
    """End a resumed choice that had ended before it was resumed."""
    if seq.num_output_tokens == 0 or seq.group.beam is not None:
        return
    if seq.tokens[-1] in seq.stops:
        state.finish(seq, FinishReason.STOP)
    elif len(seq.tokens) >= seq.max_len:
        state.finish(seq, FinishReason.LENGTH)


def _take_tokens(state: SchedulerState, record: StepRecord, tokens: list[int]) -> None:
    dropped: set[Sequence] = set()
    decode_set = record.decode_set
    if decode_set is not None and decode_set.stop_token_ids.isdisjoint(tokens):
        # The steady step: everyone wants its token, and nobody ends by it.
        for known, token in zip(decode_set.tokens, tokens, strict=True):
            known.append(token)
    else:
        dropped = _take_each_token(state, record, tokens)
    for seq in record.at_border:
        if seq.accepts:
            _count_computed(state, seq)
            if len(seq.tokens) >= seq.max_len:
                state.finish(seq, FinishReason.LENGTH)
    outcome = state.outcome
    if dropped:
        kept = [(s, t) for s, t in zip(record.sampled, tokens, strict=True) if s not in dropped]
        outcome.sampled += [seq for seq, _ in kept]
        outcome.tokens += [token for _, token in kept]
    else:
        outcome.sampled += record.sampled
        outcome.tokens += tokens
    state.counters.num_generated_tokens += len(tokens) - len(dropped)


def _take_each_token(state: SchedulerState, record: StepRecord, tokens: list[int]) -> set[Sequence]:
    """Take the tokens one by one; returns whose was one too many."""
    dropped: set[Sequence] = set()
    for seq, token in zip(record.sampled, tokens, strict=True):
        if seq.accepts:
            seq.tokens.append(token)
            if token in seq.stops:
                _count_computed(state, seq)
                state.finish(seq, FinishReason.STOP)
        elif not _take_late_token(state, seq, token):
            dropped.add(seq)
    return dropped


def _take_late_token(state: SchedulerState, seq: Sequence, token: int) -> bool:
    """Take a token of a sequence that is not simply running; False: it is discarded."""
    if seq.group.beam is not None:
        return False  # the search takes candidates, once all its beams have them
    if seq.is_finished:
        state.counters.num_discarded_tokens += 1
        return False
    if len(seq.tokens) >= seq.max_len:
        state.finish(seq, FinishReason.LENGTH)  # max_tokens is 0: only the prompt counts
        return False
    seq.tokens.append(token)
    if token in seq.stops:
        state.finish(seq, FinishReason.STOP)
    elif len(seq.tokens) >= seq.max_len:
        state.finish(seq, FinishReason.LENGTH)
    return True


def _take_extras(state: SchedulerState, record: StepRecord, result: StepResult) -> None:
    """Row errors, log-probabilities, and the candidates of beams."""
    first_positions = {s: first for s, first, _ in record.chunks}
    by_row = dict(zip(record.chunk_rows, first_positions, strict=True))
    by_row.update(zip(record.rows, record.sampled, strict=True))
    for row, message in result.row_errors.items():
        seq = by_row.get(row)
        if seq is not None and not seq.is_finished:
            state.abandon(seq.group, FinishReason.ERROR, message)
    searches: dict[SequenceGroup, dict[Sequence, tuple[TokenLogprob, ...]]] = {}
    for row, logprobs in result.logprobs.items():
        seq = by_row.get(row)
        if seq is None or seq.is_finished:
            continue
        is_beam = seq.group.beam is not None
        # A beam that was given up meanwhile will report again.
        if is_beam and logprobs.sampled is not None and seq.row is not None:
            searches.setdefault(seq.group, {})[seq] = logprobs.sampled.top
        told = RowLogprobs(None, logprobs.prompt) if is_beam else logprobs
        _take_logprobs(state, seq, told, first_positions.get(seq, 0))
    for group, candidates in searches.items():
        beam.collect(state, group, candidates)


def _take_logprobs(state: SchedulerState, seq: Sequence, logprobs: RowLogprobs, first: int) -> None:
    """Hand on a kept token's log-probabilities, and each prompt position's once, in order."""
    group = seq.group
    sampled = logprobs.sampled if len(seq.tokens) < seq.max_len else None
    prompt = logprobs.prompt
    if prompt:
        told = group.num_prompt_logprobs_told
        prompt = prompt[told - first :] if first <= told else ()
        group.num_prompt_logprobs_told += len(prompt)
    if sampled is not None:
        seq.cumulative_logprob += sampled.chosen.logprob
    if sampled is not None or prompt:
        state.outcome.logprobs.append((seq, RowLogprobs(sampled, prompt)))


def _count_computed(state: SchedulerState, seq: Sequence) -> None:
    """Count what a decoding sequence has computed."""
    seq.num_computed = len(seq.tokens) - 1
    _note_computed(state, seq)


def _note_computed(state: SchedulerState, seq: Sequence) -> None:
    """Have the blocks that are full and settled now named, if the cache is in use."""
    if seq.group.uses_cache:
        state.blocks.unnamed.append(seq)


def _count_time(state: SchedulerState, timings: StepTimings) -> None:
    """Count the executor's time; a wait that began without any request is no idleness."""
    counters = state.counters
    counters.executor_busy_ns += timings.prepare_ns + timings.forward_ns + timings.sample_ns
    if not state.had_no_request:
        counters.executor_idle_ns += timings.idle_ns
    state.had_no_request = not state.groups


def _charge(state: SchedulerState, record: StepRecord) -> None:
    for seq, _, count in record.chunks:
        state.waiting.charge(seq.group, count, 0)
    for seq in record.sampled:
        state.waiting.charge(seq.group, 0, 1)
