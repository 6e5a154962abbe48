"""The sanitizer says nothing of right plans, whoever shares whatever with whom."""

from __future__ import annotations

import numpy as np
import pytest

from executor_svc.errors import KvCheckFailed
from executor_svc.plan import RowStart, TableUpdate
from executor_svc.rows import Limits
from tests.unit.executor.kv_steps import ALICE, BOB, PROMPT, Steps, fork_of_a_prompt, swapped_out


@pytest.fixture
def steps(limits: Limits) -> Steps:
    return Steps(limits)


def test_chunks_and_decodes_are_silent(steps: Steps) -> None:
    """A prompt in chunks of any size, then decode, beside another tenant's equal one."""
    for row, lineage in ((0, ALICE), (1, BOB)):
        start = RowStart(row, PROMPT, len(PROMPT), [row, row + 2], lineage=lineage)
        steps(starts=[start], chunk_rows=[row], chunk_counts=[1])
    steps(chunk_rows=[1, 0], chunk_counts=[7, 2])
    steps(chunk_rows=[0, 1], chunk_counts=[9, 4], drawn=[50, 51])
    steps(append_rows=[0], append_blocks=[9], decode_enter_rows=[0, 1], drawn=[52, 53])
    for token in range(3):
        steps(drawn=[token, token])


def test_chunks_leave_the_tags_of_one_piece(steps: Steps) -> None:
    """How a prompt was cut does not matter to who shares it."""
    start = RowStart(0, PROMPT, len(PROMPT), [4, 5], lineage=ALICE)
    steps(starts=[start], chunk_rows=[0], chunk_counts=[5])
    steps(chunk_rows=[0], chunk_counts=[6])
    steps(chunk_rows=[0], chunk_counts=[1], drawn=[50])
    steps(decode_enter_rows=[0], drawn=[51])
    steps(decode_leave_rows=[0])
    steps.prefill(1, [*PROMPT, 50, 51], [4, 5], num_computed_tokens=13)


def test_a_copied_fork_is_silent(steps: Steps) -> None:
    """After a copy-on-write parent and fork go on apart, sharing the full block."""
    fork_of_a_prompt(steps)
    steps(
        table_updates=[TableUpdate(2, 1, [7])],
        copy_sources=[5],
        copy_destinations=[7],
        decode_enter_rows=[0, 2],
        drawn=[61, 63],
    )
    for token in range(3):
        steps(drawn=[token, token + 1])


def test_a_number_used_again_begins_afresh(steps: Steps) -> None:
    """Starts, forks and children in places of finished rows expect nothing of those."""
    for row in (0, 1, 2):
        steps.prefill(row, [80 + row, *PROMPT], [10 + row, 20 + row], BOB)
    steps(finish_rows=[0, 1, 2])
    fork_of_a_prompt(steps)
    steps(finish_rows=[0], decode_enter_rows=[2], drawn=[63])
    steps(
        child_parents=[2],
        child_rows=[1],
        child_tokens=[64],
        finish_rows=[],
        decode_leave_rows=[2],
        chunk_rows=[1],
        chunk_counts=[2],
        drawn=[65],
    )


def test_a_swap_is_silent(steps: Steps) -> None:
    """Rows whose half-filled blocks left, were overwritten and came back elsewhere go on."""
    swapped_out(steps)
    steps(
        swap_in_host_blocks=[3, 0, 1, 2],
        swap_in_device_blocks=[10, 11, 12, 13],
        table_updates=[TableUpdate(0, 0, [11, 12]), TableUpdate(1, 0, [13, 10])],
        decode_enter_rows=[0, 1],
        drawn=[51, 52],
    )
    steps(drawn=[53, 54])


def test_moves_of_one_step_are_followed_in_order(steps: Steps) -> None:
    """Swap-out, copy and swap-in of one step each see what the one before has left."""
    steps.prefill(0, PROMPT[:8], [4], drawn=[50])
    steps.prefill(1, PROMPT[::-1][:8], [5], drawn=[50])
    steps(
        swap_out_device_blocks=[5],
        swap_out_host_blocks=[1],
        copy_sources=[4],
        copy_destinations=[5],
        swap_in_host_blocks=[1],
        swap_in_device_blocks=[4],
        table_updates=[TableUpdate(0, 0, [5, 6]), TableUpdate(1, 0, [4, 7])],
        decode_enter_rows=[0, 1],
        drawn=[51, 51],
    )


def test_a_prefix_hit_is_silent(steps: Steps) -> None:
    """Full blocks of the same lineage may be read, also after their writer has gone."""
    steps.prefill(0, PROMPT, [4, 5])
    steps(finish_rows=[0])
    steps.prefill(0, [*PROMPT[:8], 90], [4, 6], num_computed_tokens=8)
    steps.prefill(1, [*PROMPT[:8], 91], [4, 7], num_computed_tokens=8)
    steps(decode_enter_rows=[0, 1], drawn=[1, 2])


def test_siblings_share_a_block_in_the_step_that_computes_it(steps: Steps) -> None:
    """A row may read what another one writes in the same step, as all writes come first."""
    writer = RowStart(1, [*PROMPT[:8], 60], 9, [4, 5], lineage=ALICE)
    reader = RowStart(0, [*PROMPT[:8], 61], 9, [4, 6], num_computed_tokens=8, lineage=ALICE)
    steps(starts=[writer, reader], chunk_rows=[0, 1], chunk_counts=[1, 9], drawn=[1, 2])


def test_beam_children_are_silent(steps: Steps) -> None:
    """Children that take each other's places, each with its copy, read only their own."""
    steps.prefill(0, PROMPT, [4, 5], num_beam_candidates=2, drawn=[])
    steps(
        child_parents=[0, 0],
        child_rows=[0, 1],
        child_tokens=[60, 61],
        table_updates=[TableUpdate(1, 1, [6])],
        copy_sources=[5],
        copy_destinations=[6],
        chunk_rows=[0, 1],
        chunk_counts=[1, 1],
    )
    # Row 1 ends; both places go on from row 0 and row 1 crosswise.
    steps(
        child_parents=[1, 0],
        child_rows=[0, 1],
        child_tokens=[62, 63],
        chunk_rows=[0, 1],
        chunk_counts=[1, 1],
    )
    steps(
        child_parents=[1, 1],
        child_rows=[0, 1],
        child_tokens=[64, 65],
        table_updates=[TableUpdate(0, 1, [7])],
        copy_sources=[5],
        copy_destinations=[7],
        chunk_rows=[0, 1],
        chunk_counts=[1, 1],
    )


def test_tokens_of_lineage_zero_are_tagged_too(steps: Steps) -> None:
    """A scheduler that names no lineage gets the check, for one common lineage."""
    steps.prefill(0, [0] * 8, [4], 0)
    steps.prefill(1, [0] * 9, [4, 5], 0, num_computed_tokens=8)
    with pytest.raises(KvCheckFailed, match="which nobody has written"):
        steps.prefill(2, [0] * 9, [6, 7], 0, num_computed_tokens=8)


def test_random_sharing_is_judged_as_its_tokens_are(limits: Limits) -> None:
    """A prefix hit is silent exactly if lineage and tokens agree on every position of it."""
    rng = np.random.default_rng(5)
    verdicts = []
    for _ in range(200):
        steps = Steps(limits)
        prefixes = rng.integers(0, 2, (2, 8)) if rng.random() < 0.5 else rng.integers(0, 2, (1, 8))
        lineages = rng.integers(0, 2, 2).tolist()
        first, second = prefixes[0].tolist(), prefixes[-1].tolist()
        steps.prefill(0, first, [4], lineages[0], drawn=[1])
        same = first == second and lineages[0] == lineages[1]
        verdicts.append(same)
        if same:
            steps.prefill(1, [*second, 1], [4, 5], lineages[1], num_computed_tokens=8)
            continue
        with pytest.raises(KvCheckFailed, match="of row 0 "):
            steps.prefill(1, [*second, 1], [4, 5], lineages[1], num_computed_tokens=8)
    assert 10 < sum(verdicts) < 190
