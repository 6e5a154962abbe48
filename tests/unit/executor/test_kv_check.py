"""The sanitizer: every kind of wrong read is reported with both owners."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from executor_svc.errors import InvalidPlan, KvCheckFailed
from executor_svc.plan import RowStart, TableUpdate
from executor_svc.rows import Limits
from tests.unit.executor.kv_steps import ALICE, BOB, PROMPT, Steps, fork_of_a_prompt, swapped_out


@pytest.fixture
def steps(limits: Limits) -> Steps:
    return Steps(limits)


@contextmanager
def reported(*parts: str) -> Iterator[None]:
    """The step is stopped by a report of one line that has all these parts."""
    with pytest.raises(KvCheckFailed) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in f"{message}."


def test_one_block_in_two_tables(steps: Steps) -> None:
    """A block given to two rows at once is reported by the one that is overwritten."""
    steps.prefill(0, PROMPT, [4, 5])
    steps.prefill(1, [*PROMPT[:8], 77], [6, 5], BOB)
    with reported(
        "row 0 (lineage 0xa11ce) reads position 8 from block 5, offset 0, ",
        "which holds position 8 of row 1 (lineage 0xb0b), written in step 2",
        "wrong slots in this step: 1.",
    ):
        steps(decode_enter_rows=[0], drawn=[51])


def test_one_block_in_two_tables_within_one_step(steps: Steps) -> None:
    """A row that reads what another one overwrites in the same step is stopped at once."""
    steps.prefill(0, PROMPT, [4, 5])
    other = RowStart(1, [70, 71, 72], 3, [4], lineage=BOB)
    with reported(
        "row 0 (lineage 0xa11ce) reads position 0 from block 4, offset 0, ",
        "position 0 of row 1 (lineage 0xb0b), written in step 2; wrong slots in this step: 3.",
    ):
        steps(starts=[other], chunk_rows=[1], chunk_counts=[3], decode_enter_rows=[0])


def test_a_missed_copy_on_write(steps: Steps) -> None:
    """A fork that writes a block which it still shares is reported by its sibling."""
    fork_of_a_prompt(steps)
    steps(decode_enter_rows=[0], drawn=[61])
    steps(decode_leave_rows=[0], decode_enter_rows=[2], drawn=[63])
    with reported(
        "row 0 (lineage 0xa11ce) reads position 12 from block 5, offset 4, ",
        "position 12 of row 2 (lineage 0xa11ce) after other tokens, written in step 3",
    ):
        steps(decode_leave_rows=[2], decode_enter_rows=[0])


def test_a_missed_copy_on_write_within_one_step(steps: Steps) -> None:
    """Two rows that write one slot in one step break the protocol; both are named."""
    fork_of_a_prompt(steps)
    with pytest.raises(InvalidPlan, match="rows 0 and 2 would both write block 5"):
        steps(decode_enter_rows=[0, 2], drawn=[61, 63])


def test_a_copy_to_the_wrong_block(steps: Steps) -> None:
    """A copy-on-write that went elsewhere leaves its row on slots that nobody has written."""
    fork_of_a_prompt(steps)
    with reported(
        "row 2 (lineage 0xa11ce) reads position 8 from block 7, offset 0, which nobody has written",
        "wrong slots in this step: 4.",
    ):
        steps(
            table_updates=[TableUpdate(2, 1, [7])],
            copy_sources=[5],
            copy_destinations=[8],
            decode_enter_rows=[2],
        )


def test_a_block_reused_too_early(steps: Steps) -> None:
    """A block handed on, written and given back while its first row lives is reported."""
    steps.prefill(0, PROMPT, [4, 5])
    steps.prefill(1, PROMPT, [5, 6], BOB)
    steps(finish_rows=[1])
    with reported(
        "row 0 (lineage 0xa11ce) reads position 8 from block 5, offset 0, ",
        "holds position 0 of row 1 (lineage 0xb0b), written in step 2",
    ):
        steps(decode_enter_rows=[0])


def test_a_swap_in_of_another_host_block(steps: Steps) -> None:
    """A row that gets another one's block back from the host is reported with its writer."""
    swapped_out(steps)
    with reported(
        "row 0 (lineage 0xa11ce) reads position 8 from block 9, offset 0, ",
        "holds position 8 of row 1 (lineage 0xb0b), written in step 2",
    ):
        steps(
            swap_in_host_blocks=[0, 3],
            swap_in_device_blocks=[8, 9],
            table_updates=[TableUpdate(0, 0, [8, 9])],
            decode_enter_rows=[0],
        )


def test_a_crossed_swap(steps: Steps) -> None:
    """The row's own blocks in the wrong order are reported by position."""
    swapped_out(steps)
    with reported(
        "row 0 (lineage 0xa11ce) reads position 0 from block 8, offset 0, ",
        "holds position 8 of row 0 (lineage 0xa11ce), written in step 1",
    ):
        steps(
            swap_in_host_blocks=[0, 1],
            swap_in_device_blocks=[9, 8],
            table_updates=[TableUpdate(0, 0, [8, 9])],
            decode_enter_rows=[0],
        )


def test_a_missed_swap_in(steps: Steps) -> None:
    """A row that goes on in its old blocks reads what was written there meanwhile."""
    swapped_out(steps)
    with reported("row 0 ", "position 0 of row 2 (lineage 0xb0b), written in step 4"):
        steps(decode_enter_rows=[0])


def test_a_prefix_hit_on_other_tokens(steps: Steps) -> None:
    """A cached block of the same lineage with one other token in it is no prefix."""
    steps.prefill(0, PROMPT, [4, 5])
    other = [*PROMPT[:3], 90, *PROMPT[4:]]
    with reported(
        "row 1 (lineage 0xa11ce) reads position 3 from block 4, offset 3, ",
        "position 3 of row 0 (lineage 0xa11ce) after other tokens, written in step 1",
        "wrong slots in this step: 5.",
    ):
        steps.prefill(1, other, [4, 6], num_computed_tokens=8)


def test_a_prefix_hit_across_lineages(steps: Steps) -> None:
    """The same tokens are another tenant's all the same."""
    steps.prefill(0, PROMPT, [4, 5], ALICE)
    with reported(
        "row 1 (lineage 0xb0b) reads position 0 from block 4, offset 0, ",
        "position 0 of row 0 (lineage 0xa11ce), written in step 1",
        "wrong slots in this step: 8.",
    ):
        steps.prefill(1, PROMPT, [4, 6], BOB, num_computed_tokens=8)


def test_a_prefix_hit_further_along(steps: Steps) -> None:
    """A block of equal tokens after another beginning is no prefix either."""
    steps.prefill(0, [*range(30, 38), *PROMPT], [4, 5, 6])
    with reported("row 1 ", "block 5, offset 0, which holds position 8 of row 0"):
        steps.prefill(1, PROMPT, [5, 7], num_computed_tokens=8)


def test_stale_content_after_a_recompute(steps: Steps) -> None:
    """A row that is computed again, but not all of it, does not get its old blocks' rest."""
    steps.prefill(0, PROMPT, [4, 5])
    steps(decode_enter_rows=[0], drawn=[51])
    steps(finish_rows=[0])
    # The next life of the row drew another token at position 12, yet skips it.
    again = [*PROMPT, 52, 53]
    with reported(
        "row 0 (lineage 0xa11ce) reads position 12 from block 5, offset 4, ",
        "position 12 of row 0 (lineage 0xa11ce) after other tokens, written in step 2",
    ):
        steps.prefill(0, again, [4, 5], num_computed_tokens=13)


def test_a_table_replaced_by_a_wrong_block(steps: Steps) -> None:
    """A table entry that is exchanged without its content is reported."""
    steps.prefill(0, PROMPT, [4, 5])
    steps.prefill(1, PROMPT, [6, 7], BOB)
    steps(decode_enter_rows=[0], drawn=[51])
    with reported("row 0 ", "from block 6, offset 0, which holds position 0 of row 1"):
        steps(table_updates=[TableUpdate(0, 0, [6])], drawn=[52])


def test_computed_tokens_that_nobody_computed(steps: Steps) -> None:
    """num_computed_tokens over blocks that were never written is reported."""
    with reported(
        "row 3 (lineage 0xa11ce) reads position 0 from block 4, offset 0, "
        "which nobody has written; wrong slots in this step: 8."
    ):
        steps.prefill(3, PROMPT, [4, 5], num_computed_tokens=8)


def test_the_rest_of_a_half_written_block(steps: Steps) -> None:
    """A prefix hit on a block that is not full yet is reported at its first empty slot."""
    steps.prefill(0, PROMPT, [4, 5])
    with reported("reads position 12 from block 5, offset 4, which nobody has written"):
        steps.prefill(1, [*PROMPT, 1, 2, 3, 4, 5], [4, 5, 6], num_computed_tokens=16)


def test_moved_garbage_is_reported_where_it_came_from(steps: Steps) -> None:
    """After a copy, a swap out and a swap in the report still names the writer."""
    steps.prefill(0, PROMPT, [4, 5], BOB)
    steps(
        swap_out_device_blocks=[4],
        swap_out_host_blocks=[2],
        copy_sources=[5],
        copy_destinations=[9],
        swap_in_host_blocks=[2],
        swap_in_device_blocks=[20],
    )
    with reported("from block 20, offset 0, which holds position 0 of row 0 (lineage 0xb0b)"):
        steps.prefill(1, PROMPT, [20, 9], num_computed_tokens=8)


def test_a_new_owner_may_read_nothing(steps: Steps) -> None:
    """After a claim even the same lineage's prefix counts as never written."""
    steps.prefill(0, PROMPT, [4, 5])
    steps(swap_out_device_blocks=[4], swap_out_host_blocks=[0])
    steps.rows.reset()
    steps.kv_check.reset()
    start = {"swap_in_host_blocks": [0], "swap_in_device_blocks": [9], "num_computed_tokens": 8}
    with reported("which nobody has written"):
        steps.prefill(0, PROMPT, [4, 5], num_computed_tokens=8)
    with reported("which nobody has written"):
        steps.prefill(1, PROMPT, [9, 5], **start)


@pytest.mark.parametrize("swap", [(0, 1), (2, 11), (7, 8)])
def test_order_counts(steps: Steps, swap: tuple[int, int]) -> None:
    """The same tokens in another order are another prefix, from the first that differs on."""
    steps.prefill(0, PROMPT, [4, 5])
    first, second = swap
    other = list(PROMPT)
    other[first], other[second] = other[second], other[first]
    with reported(f"reads position {first} ", f"wrong slots in this step: {12 - first}."):
        steps.prefill(1, [*other, 1], [4, 5], num_computed_tokens=12)


def test_a_beam_child_without_its_copy(steps: Steps) -> None:
    """Two children of one beam on one block: the second one's step shows the first."""
    steps.prefill(0, PROMPT, [4, 5], num_beam_candidates=2, drawn=[])
    children = {"child_parents": [0, 0], "child_rows": [0, 1], "child_tokens": [60, 61]}
    steps(**children, chunk_rows=[0], chunk_counts=[1])
    steps(chunk_rows=[1], chunk_counts=[1])
    with reported("row 0 ", "position 12 of row 1 (lineage 0xa11ce) after other tokens"):
        steps(
            child_parents=[0],
            child_rows=[0],
            child_tokens=[62],
            chunk_rows=[0],
            chunk_counts=[1],
        )
