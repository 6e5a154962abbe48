"""From rows to a flat batch: places, slots, who draws, and forks."""

from __future__ import annotations

import pytest

from executor_svc.batch import StepBatch, build_batch
from executor_svc.errors import InvalidPlan
from executor_svc.plan import Plan, RowStart
from executor_svc.rows import Limits, RowTable


@pytest.fixture
def rows(limits: Limits) -> RowTable:
    table = RowTable(limits)
    table.apply(
        Plan(
            starts=[
                RowStart(1, list(range(10, 20)), 10, [4, 2]),
                RowStart(5, [30, 31, 32], 2, [9], num_computed_tokens=2),
                RowStart(6, list(range(40, 49)), 9, [20, 21], num_prompt_logprobs=0),
            ],
            decode_enter_rows=[5],
        )
    )
    return table


def build(rows: RowTable, **fields: object) -> StepBatch:
    plan = Plan(**fields)  # type: ignore[arg-type]
    rows.apply(plan)
    return build_batch(rows, plan)


def test_decodes_come_first_then_chunks(rows: RowTable) -> None:
    """A mixed step lays out the decode row's one token, then each chunk's tokens."""
    batch = build(rows, chunk_rows=[1], chunk_counts=[9])
    assert batch.num_decodes == 1
    assert batch.token_ids.tolist() == [32, *range(10, 19)]
    assert batch.positions.tolist() == [2, *range(9)]
    assert batch.slots.tolist() == [9 * 8 + 2, *range(32, 40), 16]
    assert batch.context_lens.tolist() == [3, 9]
    assert batch.chunk_starts.tolist() == [1, 10]


def test_only_rows_without_pending_tokens_draw(rows: RowTable) -> None:
    """A prompt draws in the step that computes its last token, not before."""
    first = build(rows, chunk_rows=[1], chunk_counts=[6], decode_leave_rows=[5])
    assert first.sample_rows.tolist() == []
    second = build(rows, chunk_rows=[1], chunk_counts=[4])
    assert second.positions.tolist() == [6, 7, 8, 9]
    assert second.sample_rows.tolist() == [1]
    assert second.kept_tokens.tolist() == [3]


def test_sampling_rows_are_ascending_and_forks_share_logits(rows: RowTable) -> None:
    """Forks below and above their parent take its logits and stand in order of rows."""
    batch = build(
        rows,
        chunk_rows=[6, 1],
        chunk_counts=[9, 10],
        fork_parents=[6, 6],
        fork_rows=[0, 7],
        fork_sample_indices=[1, 2],
    )
    assert batch.sample_rows.tolist() == [0, 1, 5, 6, 7]
    of_row = dict(zip(batch.sample_rows.tolist(), batch.sample_logits.tolist(), strict=True))
    assert of_row[0] == of_row[6] == of_row[7]
    assert batch.kept_tokens[of_row[6]] == 9  # the last of nine tokens after one decode
    assert batch.kept_tokens[of_row[1]] == 19
    assert rows.state["sample_index"][[0, 6, 7]].tolist() == [1, 0, 2]
    assert rows.tables[7, :2].tolist() == [20, 21]


def test_prompt_positions_are_told_once_over_all_chunks(rows: RowTable) -> None:
    """Chunks of a prompt of nine together tell its eight positions after the first."""
    told = []
    for count in (1, 4, 4):
        batch = build(
            rows, chunk_rows=[6], chunk_counts=[count], decode_leave_rows=[5][: len(told) == 0]
        )
        for span in batch.prompt_spans:
            told += span.targets.tolist()
            places = batch.kept_tokens[span.first_logits :][: len(span.targets)]
            assert batch.token_ids[places].tolist() == [token - 1 for token in span.targets]
    assert told == list(range(41, 49))


def test_a_step_may_compute_nothing(rows: RowTable) -> None:
    """A plan that only finishes or moves has an empty batch."""
    assert build(rows, finish_rows=[5]).num_tokens == 0


BROKEN = {
    "chunk_rows: row 2 does not exist": Plan(chunk_rows=[2], chunk_counts=[1]),
    "chunk_rows: row 1 comes twice": Plan(chunk_rows=[1, 1], chunk_counts=[1, 1]),
    "chunk_rows: row 5 is in the decode set": Plan(chunk_rows=[5], chunk_counts=[1]),
    "row 1 has 10 known tokens to compute, not 11": Plan(chunk_rows=[1], chunk_counts=[11]),
    "row 1 has 10 known tokens to compute, not 0": Plan(chunk_rows=[1], chunk_counts=[0]),
    "chunk_rows has 1, chunk_counts has 2": Plan(chunk_rows=[1], chunk_counts=[1, 2]),
    "row 1 has 10 tokens to compute, not one": Plan(decode_enter_rows=[1]),
    "fork_rows: row 6 exists already": Plan(
        chunk_rows=[1],
        chunk_counts=[10],
        fork_parents=[1],
        fork_rows=[6],
        fork_sample_indices=[1],
    ),
    "row 5 is not a chunk row that samples": Plan(
        fork_parents=[5], fork_rows=[0], fork_sample_indices=[1]
    ),
    "row 1 is not a chunk row that samples": Plan(
        chunk_rows=[1], chunk_counts=[3], fork_parents=[1], fork_rows=[0], fork_sample_indices=[1]
    ),
    "would both write block 9": Plan(
        starts=[RowStart(0, [1, 2, 3], 3, [9])], chunk_rows=[0], chunk_counts=[3]
    ),
    "table of row 0 has 1 blocks, too short for 9 tokens": Plan(
        starts=[RowStart(0, [1] * 9, 9, [3])], chunk_rows=[0], chunk_counts=[9]
    ),
    "row 0 would have 65 computed tokens, more than max_model_len 64": Plan(
        starts=[RowStart(0, [1] * 65, 65, [3] * 9, num_computed_tokens=60)],
        chunk_rows=[0],
        chunk_counts=[5],
    ),
    "the step has 65 tokens, more than max_num_batched_tokens 64": Plan(
        starts=[RowStart(0, [1] * 64, 64, list(range(10, 18)))],
        chunk_rows=[0],
        chunk_counts=[64],
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_plans_are_named(rows: RowTable, message: str) -> None:
    """Work that a row cannot do is refused with the row and what is wrong."""
    rows.apply(BROKEN[message])
    with pytest.raises(InvalidPlan) as caught:
        build_batch(rows, BROKEN[message])
    assert message in str(caught.value)
