"""The row table: deltas in the order of the protocol, and what it refuses."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest

from executor_svc.errors import InvalidPlan
from executor_svc.plan import Plan, RowStart, Sampling, TableUpdate
from executor_svc.rows import Limits, RowTable


def start(row: int, tokens: list[int] | None = None, **fields: object) -> RowStart:
    known = [1, 2, 3] if tokens is None else tokens
    values = {"num_prompt_tokens": len(known), "blocks": [0], **fields}
    return RowStart(row, known, **values)  # type: ignore[arg-type]


@pytest.fixture
def rows(limits: Limits) -> RowTable:
    return RowTable(limits)


def table(rows: RowTable, row: int) -> list[int]:
    return rows.tables[row, : rows.num_blocks[row]].tolist()


def known(rows: RowTable, row: int) -> list[int]:
    return rows.tokens[row, : rows.num_tokens[row]].tolist()


def test_start_after_finish_reuses_the_number(rows: RowTable) -> None:
    """A row finished and started in one plan is the new row, outside the decode set."""
    rows.apply(Plan(starts=[start(3)], decode_enter_rows=[3]))
    rows.apply(Plan(finish_rows=[3], starts=[start(3, [9], blocks=[5])]))
    assert known(rows, 3) == [9]
    assert table(rows, 3) == [5]
    assert rows.decode_rows.tolist() == []


def test_children_are_all_read_before_one_is_written(rows: RowTable) -> None:
    """Two beams that swap parents each get the other's tokens and table."""
    rows.apply(Plan(starts=[start(0, [1, 2], blocks=[4]), start(1, [7, 8], blocks=[6, 9])]))
    rows.apply(Plan(child_parents=[1, 0, 0], child_rows=[0, 1, 2], child_tokens=[50, 51, 52]))
    assert [known(rows, row) for row in (0, 1, 2)] == [[7, 8, 50], [1, 2, 51], [1, 2, 52]]
    assert [table(rows, row) for row in (0, 1, 2)] == [[6, 9], [4], [4]]


def test_copies_take_the_restrictions_too(rows: RowTable) -> None:
    """A copy is bound by its parent's bias, and one of a free parent by nothing."""
    bound = Sampling(logit_bias={3: 5.0}, allowed_token_ids=[8])
    rows.apply(Plan(starts=[start(0, sampling=bound), start(1), start(2, sampling=bound)]))
    rows.copy_rows([0, 1], [5, 2])
    assert rows.restrictions[5].allowed_tokens.tolist() == [8]
    assert sorted(rows.restrictions) == [0, 5]


def test_decode_membership_belongs_to_the_row_number(rows: RowTable) -> None:
    """A child that takes the number of a decoding row decodes; one with a new number not."""
    rows.apply(Plan(starts=[start(0), start(1)], decode_enter_rows=[1]))
    rows.apply(Plan(child_parents=[0, 0], child_rows=[1, 5], child_tokens=[4, 5]))
    assert rows.decode_rows.tolist() == [1]


def test_table_updates_come_before_appends(rows: RowTable) -> None:
    """An append of the same plan lands after the table that an update left."""
    rows.apply(Plan(starts=[start(0, blocks=[1, 2, 3])]))
    rows.apply(
        Plan(
            table_updates=[TableUpdate(0, 1, [8], truncate=True)],
            append_rows=[0, 0],
            append_blocks=[11, 12],
        )
    )
    assert table(rows, 0) == [1, 8, 11, 12]


def test_update_without_truncate_keeps_the_rest(rows: RowTable) -> None:
    """A copy-on-write in the middle of a table changes that entry only."""
    rows.apply(Plan(starts=[start(0, blocks=[1, 2, 3])]))
    rows.apply(Plan(table_updates=[TableUpdate(0, 1, [9])]))
    assert table(rows, 0) == [1, 9, 3]


def test_digest_is_over_little_endian_words(rows: RowTable) -> None:
    """The audit's checksum can be computed by anyone from the documented bytes."""
    rows.apply(Plan(starts=[start(2, [1, 2, 3, 4], blocks=[7, 30], num_computed_tokens=2)]))
    (digest,) = rows.digests()
    assert (digest.row, digest.num_tokens, digest.num_computed_tokens) == (2, 4, 2)
    assert digest.table_crc32 == zlib.crc32(struct.pack("<2I", 7, 30))


def test_reset_forgets_everything(rows: RowTable) -> None:
    """After a reset every number is free, and nothing restricts its new row."""
    limited = Sampling(logit_bias={3: 5.0})
    rows.apply(Plan(starts=[start(0, sampling=limited)], decode_enter_rows=[0]))
    rows.reset()
    assert (rows.num_live, rows.digests(), rows.restrictions) == (0, [], {})
    rows.apply(Plan(starts=[start(0)]))
    assert rows.decode_rows.tolist() == []


def test_a_fresh_row_does_not_inherit(rows: RowTable) -> None:
    """Sampling of a finished row says nothing about the next row of its number."""
    rows.apply(Plan(starts=[start(0, sampling=Sampling(logit_bias={3: 5.0}, presence_penalty=1))]))
    rows.apply(Plan(finish_rows=[0], starts=[start(0)]))
    assert 0 not in rows.restrictions
    assert not rows.state[0]["has_penalties"]


def test_appended_tokens_follow_the_known_ones(rows: RowTable) -> None:
    """A drawn token stands right after the tokens known before."""
    rows.apply(Plan(starts=[start(0, [1, 2]), start(4, [3])]))
    rows.append_tokens(np.array([0, 4]), np.array([60, 61]))
    assert (known(rows, 0), known(rows, 4)) == ([1, 2, 60], [3, 61])


BROKEN = {
    "finish_rows: row 5 does not exist": Plan(finish_rows=[5]),
    "finish_rows: row 0 does not exist": Plan(finish_rows=[0, 0]),
    "starts: row 8 is not below max_num_rows 8": Plan(starts=[start(8)]),
    "starts: row 0 exists already": Plan(starts=[start(0)]),
    "row 1 has 0 tokens, not between 1 and 65": Plan(starts=[start(1, [], num_prompt_tokens=0)]),
    "row 1 has 66 tokens, not between 1 and 65": Plan(starts=[start(1, [1] * 66)]),
    "num_prompt_tokens 4 of 3 tokens": Plan(starts=[start(1, num_prompt_tokens=4)]),
    "num_prompt_tokens 0 of 3 tokens": Plan(starts=[start(1, num_prompt_tokens=0)]),
    "4 computed of 3 tokens": Plan(starts=[start(1, num_computed_tokens=4)]),
    "0 blocks for 2 computed": Plan(starts=[start(1, blocks=[], num_computed_tokens=2)]),
    "row 1: block 32 is not below 32": Plan(starts=[start(1, blocks=[32])]),
    "row 1: token 97 is not below vocab_size 97": Plan(starts=[start(1, [97])]),
    "logit_bias: token 99": Plan(starts=[start(1, sampling=Sampling(logit_bias={99: 1.0}))]),
    "allowed_token_ids: token 98": Plan(
        starts=[start(1, sampling=Sampling(allowed_token_ids=[98]))]
    ),
    "child_parents has 1, child_rows has 2": Plan(child_parents=[0], child_rows=[1, 2]),
    "child_parents: row 2 does not exist": Plan(
        child_parents=[2], child_rows=[1], child_tokens=[1]
    ),
    "child_rows: row 1 comes twice": Plan(
        child_parents=[0, 0], child_rows=[1, 1], child_tokens=[1, 2]
    ),
    "table_updates: row 1 does not exist": Plan(table_updates=[TableUpdate(1, 0, [1])]),
    "none before logical block 2": Plan(table_updates=[TableUpdate(0, 2, [1])]),
    "would have 10 blocks, more than the 9": Plan(table_updates=[TableUpdate(0, 1, [1] * 9)]),
    "append_rows has 1, append_blocks has 0": Plan(append_rows=[0]),
    "append_rows: row 6 does not exist": Plan(append_rows=[6], append_blocks=[1]),
    "append_blocks: block 40 is not below 32": Plan(append_rows=[0], append_blocks=[40]),
    "the table of row 0 is full at 9": Plan(append_rows=[0] * 9, append_blocks=[2] * 9),
    "swap_out_host_blocks: block 4 is not below 4": Plan(
        swap_out_device_blocks=[1], swap_out_host_blocks=[4]
    ),
    "swap_out_host_blocks: block 1 comes twice": Plan(
        swap_out_device_blocks=[1, 2], swap_out_host_blocks=[1, 1]
    ),
    "swap_in_device_blocks: block 32": Plan(swap_in_host_blocks=[0], swap_in_device_blocks=[32]),
    "copy_destinations: block 3 comes twice": Plan(copy_sources=[1, 2], copy_destinations=[3, 3]),
    "copies: block 2 is both source and destination": Plan(
        copy_sources=[1, 2], copy_destinations=[2, 3]
    ),
    "copy_sources has 1, copy_destinations has 0": Plan(copy_sources=[1]),
    "decode_leave_rows: row 0 is not in the decode set": Plan(decode_leave_rows=[0]),
    "decode_enter_rows: row 0 is in the decode set already": Plan(decode_enter_rows=[0, 0]),
}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [NAN, INF, -0.5]),
        ("top_p", [NAN, 0.0, -0.1, 1.5]),
        ("min_p", [NAN, -0.1, 2.0]),
        ("repetition_penalty", [NAN, INF, 0.0, 0.009, 101.0]),
        ("presence_penalty", [NAN, INF, -INF]),
        ("frequency_penalty", [NAN, INF, -INF]),
    ],
)
def test_sampling_out_of_bounds_is_named(rows: RowTable, name: str, values: list[float]) -> None:
    """A value that the sampler has no meaning for is refused with its field."""
    for value in values:
        with pytest.raises(InvalidPlan, match=f"row 1 has {name} "):
            rows.apply(Plan(starts=[start(1, sampling=Sampling(**{name: value}))]))


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"num_logprobs": 1001}, 1000),
        ({"num_prompt_logprobs": 1001}, 1000),
        ({"num_beam_candidates": 98}, 97),
    ],
)
def test_counts_out_of_bounds_are_named(rows: RowTable, fields: dict[str, int], most: int) -> None:
    """More log-probabilities than a thousand, or candidates than tokens, are refused."""
    with pytest.raises(InvalidPlan, match=f"{next(iter(fields))} .* not at most {most}"):
        rows.apply(Plan(starts=[start(1, **fields)]))


def test_infinite_bias_is_refused(rows: RowTable) -> None:
    """A bias must leave the logit a number."""
    with pytest.raises(InvalidPlan, match=r"logit_bias\[3\] nan, not finite"):
        rows.apply(Plan(starts=[start(1, sampling=Sampling(logit_bias={3: NAN}))]))


def test_bounds_themselves_are_allowed(rows: RowTable) -> None:
    """Both ends of every closed bound are served, in the precision of the wire."""
    low = Sampling(0, 0, 1e-6, 0, float(np.float32(0.01)), -2, -2)
    high = Sampling(100, 2**32 - 1, 1, 1, 100, 2, 2)
    most = {"num_logprobs": 1000, "num_prompt_logprobs": 1000, "num_beam_candidates": 97}
    rows.apply(Plan(starts=[start(1, sampling=low), start(2, sampling=high, **most)]))
    assert rows.num_live == 2


@pytest.mark.parametrize("message", BROKEN)
def test_broken_plans_are_named(rows: RowTable, message: str) -> None:
    """A plan that breaks the protocol is refused with the field and what is wrong."""
    rows.apply(Plan(starts=[start(0)]))
    with pytest.raises(InvalidPlan) as caught:
        rows.apply(BROKEN[message])
    assert message in str(caught.value)
