"""From the row table to one step's flat token batch, in numpy.

Decode rows come first, ascending, one token each; then the prefill chunks in the
plan's order. Which rows draw a token is known here already, so forks are made here
too: a forward pass changes neither tokens nor tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from executor_svc.errors import InvalidPlan
from executor_svc.plan import Plan
from executor_svc.rows import RowTable, require_distinct, require_parallel

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Prompt positions of one row whose log-probabilities this step can tell.

    `first_logits` is the place of the first one among the kept logits; the logits of
    one position say how likely the token of the next one was.
    """

    row: int
    num_top: int
    first_logits: int
    targets: Ints


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's tokens. T tokens of `num_decodes` decode rows and some chunks."""

    token_ids: Ints
    """[T]"""
    token_rows: Ints
    """[T] row of each token."""
    positions: Ints
    """[T] position of each token in its sequence."""
    slots: Ints
    """[T] slot that each token's K/V are written to; distinct."""
    num_decodes: int
    sequence_rows: Ints
    """[num_decodes + num_chunks] row of each sequence."""
    chunk_starts: Ints
    """[num_chunks + 1] where each chunk begins in the flat batch; the last is T."""
    context_lens: Ints
    """[num_decodes + num_chunks] tokens that the last query of each may attend to."""
    block_tables: npt.NDArray[np.int32]
    """[num_decodes + num_chunks, max_blocks] entries past the context mean nothing."""
    kept_tokens: Ints
    """[K] places in the flat batch whose logits are wanted."""
    sample_rows: Ints
    """[S] rows that draw a token, ascending."""
    sample_logits: Ints
    """[S] place of each one's logits among the kept ones; forks share their parent's."""
    prompt_spans: list[PromptSpan]

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return len(self.token_ids)


def build_batch(rows: RowTable, plan: Plan) -> StepBatch:
    """Lay out the step's tokens, count them as computed, and make the forks.

    Raises:
        InvalidPlan: if a row cannot compute what the plan says.
    """
    decode = rows.decode_rows
    chunk_rows, counts = _chunks(rows, plan)
    _check_decodes(rows, decode)
    num_tokens = len(decode) + int(counts.sum())
    if num_tokens > rows.limits.max_num_batched_tokens:
        raise InvalidPlan(
            f"the step has {num_tokens} tokens, more than max_num_batched_tokens "
            f"{rows.limits.max_num_batched_tokens}"
        )
    sequence_rows = np.concatenate([decode, chunk_rows])
    lengths = np.concatenate([np.ones(len(decode), np.int64), counts])
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    computed = rows.num_computed[sequence_rows]
    context_lens = computed + lengths
    _check_room(rows, sequence_rows, context_lens)

    token_rows = np.repeat(sequence_rows, lengths)
    positions = np.arange(num_tokens) - np.repeat(starts[:-1] - computed, lengths)
    block_size = rows.limits.block_size
    blocks = rows.tables[token_rows, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    _check_slots(slots, token_rows, block_size)

    rows.num_computed[sequence_rows] = context_lens
    max_blocks = -(-int(context_lens.max(initial=0)) // block_size)
    last_tokens = starts[1:] - 1
    draws = context_lens == rows.num_tokens[sequence_rows]
    _make_forks(rows, plan, set(chunk_rows[draws[len(decode) :]].tolist()))
    sample_rows, sample_logits = _samplers(sequence_rows[draws], plan)
    spans, span_tokens = _prompt_spans(
        rows, chunk_rows, counts, starts[len(decode) :], first_logits=int(draws.sum())
    )
    return StepBatch(
        token_ids=rows.tokens[token_rows, positions].astype(np.int64),
        token_rows=token_rows,
        positions=positions,
        slots=slots,
        num_decodes=len(decode),
        sequence_rows=sequence_rows,
        chunk_starts=starts[len(decode) :],
        context_lens=context_lens,
        block_tables=rows.tables[sequence_rows, :max_blocks],
        kept_tokens=np.concatenate([last_tokens[draws], *span_tokens]),
        sample_rows=sample_rows,
        sample_logits=sample_logits,
        prompt_spans=spans,
    )


def _chunks(rows: RowTable, plan: Plan) -> tuple[Ints, Ints]:
    require_parallel(chunk_rows=plan.chunk_rows, chunk_counts=plan.chunk_counts)
    require_distinct(plan.chunk_rows, "chunk_rows", "row")
    for row, count in zip(plan.chunk_rows, plan.chunk_counts, strict=True):
        rows.require_live(row, "chunk_rows")
        if rows.in_decode[row]:
            raise InvalidPlan(f"chunk_rows: row {row} is in the decode set")
        known = int(rows.num_tokens[row] - rows.num_computed[row])
        if not 1 <= count <= known:
            raise InvalidPlan(
                f"chunk_counts: row {row} has {known} known tokens to compute, not {count}"
            )
    return np.asarray(plan.chunk_rows, np.int64), np.asarray(plan.chunk_counts, np.int64)


def _check_decodes(rows: RowTable, decode: Ints) -> None:
    pending = rows.num_tokens[decode] - rows.num_computed[decode]
    wrong = np.flatnonzero(pending != 1)
    if wrong.size:
        raise InvalidPlan(
            f"the decode set: row {decode[wrong[0]]} has {pending[wrong[0]]} tokens to "
            "compute, not one"
        )


def _check_room(rows: RowTable, sequence_rows: Ints, context_lens: Ints) -> None:
    wrong = np.flatnonzero(context_lens > rows.limits.max_model_len)
    if wrong.size:
        raise InvalidPlan(
            f"row {sequence_rows[wrong[0]]} would have {context_lens[wrong[0]]} computed "
            f"tokens, more than max_model_len {rows.limits.max_model_len}"
        )
    room = rows.num_blocks[sequence_rows] * rows.limits.block_size
    wrong = np.flatnonzero(context_lens > room)
    if wrong.size:
        row = sequence_rows[wrong[0]]
        raise InvalidPlan(
            f"the table of row {row} has {rows.num_blocks[row]} blocks, too short for "
            f"{context_lens[wrong[0]]} tokens"
        )


def _check_slots(slots: Ints, token_rows: Ints, block_size: int) -> None:
    """Two tokens written to one slot: a block that should have been copied first."""
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if twice.size:
        first, second = token_rows[order[twice[0]]], token_rows[order[twice[0] + 1]]
        raise InvalidPlan(
            f"rows {first} and {second} would both write block {ordered[twice[0]] // block_size}"
        )


def _make_forks(rows: RowTable, plan: Plan, sampling_chunks: set[int]) -> None:
    parents, children = plan.fork_parents, plan.fork_rows
    require_parallel(
        fork_parents=parents,
        fork_rows=children,
        fork_sample_indices=plan.fork_sample_indices,
    )
    if not children:
        return
    require_distinct(children, "fork_rows", "row")
    for parent, child in zip(parents, children, strict=True):
        rows.require_number(child, "fork_rows")
        if rows.live[child]:
            raise InvalidPlan(f"fork_rows: row {child} exists already")
        if parent not in sampling_chunks:
            raise InvalidPlan(
                f"fork_parents: row {parent} is not a chunk row that samples in this step"
            )
    rows.copy_rows(parents, children)
    rows.state["sample_index"][list(children)] = plan.fork_sample_indices
    rows.state["num_prompt_logprobs"][list(children)] = -1  # the parent has told them


def _samplers(drawing: Ints, plan: Plan) -> tuple[Ints, Ints]:
    """Rows that draw, ascending, and where each one's logits are among the kept."""
    logits = np.arange(len(drawing))
    sample_rows = drawing
    if plan.fork_rows:
        place = {row: index for index, row in enumerate(drawing.tolist())}
        sample_rows = np.concatenate([drawing, np.asarray(plan.fork_rows, np.int64)])
        forked = [place[parent] for parent in plan.fork_parents]
        logits = np.concatenate([logits, np.asarray(forked, np.int64)])
    order = np.argsort(sample_rows)
    return sample_rows[order], logits[order]


def _prompt_spans(
    rows: RowTable, chunk_rows: Ints, counts: Ints, starts: Ints, first_logits: int
) -> tuple[list[PromptSpan], list[Ints]]:
    spans: list[PromptSpan] = []
    places: list[Ints] = []
    for row, count, start in zip(chunk_rows.tolist(), counts.tolist(), starts, strict=False):
        state = rows.state[row]
        if state["num_prompt_logprobs"] < 0:
            continue
        end = int(state["num_computed"])
        begin = end - count
        num_positions = min(end, int(state["num_prompt"]) - 1) - begin
        if num_positions <= 0:
            continue
        targets = rows.tokens[row, begin + 1 : begin + 1 + num_positions].astype(np.int64)
        spans.append(PromptSpan(row, int(state["num_prompt_logprobs"]), first_logits, targets))
        places.append(start + np.arange(num_positions))
        first_logits += num_positions
    return spans, places
