"""Tests of octavo_gateway.frames: what a line has, and what it leaves out."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from octavo.v1 import admin_pb2
from octavo_client import Snapshot
from octavo_client._admin import parse_snapshot
from octavo_gateway.frames import MAX_IDLE_SEQUENCES, FrameEncoder


def snapshot(
    *,
    kinds: bytes = b"\x02\x02\x01\x00\x03",
    ref_counts: tuple[int, ...] = (4, 1, 0, 0, 1),
    tables: tuple[tuple[int, ...], ...] = ((0, 1), (0, 70_000)),
    num_waiting: int = 0,
) -> Snapshot:
    """One executor, with a sequence of one request for each table, and a queue."""
    executor = admin_pb2.ExecutorState(address="e:1", connected=True)
    executor.blocks.kinds = kinds
    executor.blocks.ref_counts.extend(ref_counts)
    for index, table in enumerate(tables):
        executor.sequences.add(
            request_id="r", sample_index=index, status="running", block_table=table
        )
    for index in range(num_waiting):
        executor.sequences.add(request_id=f"w{index}", status="waiting")
    executor.steps.add(step_id=7, forward_ns=5_000_000, copied_blocks=[3])
    return parse_snapshot(
        admin_pb2.Snapshot(
            scheduler_id="s", time_unix_ns=1_500_000_000_123_000_000, executors=[executor]
        )
    )


def executor_of(line: bytes) -> dict[str, Any]:
    assert b"\n" not in line
    (executor,) = json.loads(line)["executors"]
    return dict(executor)


def test_arrays_are_packed_little_endian() -> None:
    """A byte for each block's kind and count, and the tables as 32-bit numbers."""
    executor = executor_of(FrameEncoder().encode(snapshot()))
    assert base64.b64decode(executor["kinds"]) == b"\x02\x02\x01\x00\x03"
    assert base64.b64decode(executor["ref_counts"]) == b"\x04\x01\x00\x00\x01"
    assert base64.b64decode(executor["tables"]) == struct.pack("<4I", 0, 1, 0, 70_000)
    assert [each["num_blocks"] for each in executor["sequences"]] == [2, 2]
    assert [each["sample_index"] for each in executor["sequences"]] == [0, 1]


def test_times_are_milliseconds_and_steps_keep_their_moves() -> None:
    """The page plots steps, and flashes the blocks that they made."""
    line = FrameEncoder().encode(snapshot())
    assert json.loads(line)["time_ms"] == 1_500_000_000_123
    (step,) = executor_of(line)["steps"]
    assert (step["step_id"], step["forward_ns"], step["copied_blocks"]) == (7, 5_000_000, [3])


def test_counts_beyond_a_byte_are_clamped() -> None:
    """256 references look like 255, and not like none."""
    executor = executor_of(FrameEncoder().encode(snapshot(ref_counts=(256, 255, 100_000, 0, 1))))
    assert base64.b64decode(executor["ref_counts"]) == b"\xff\xff\xff\x00\x01"


def test_blocks_that_did_not_change_are_left_out() -> None:
    """And come again as soon as one of them changes, or a new reader begins."""
    encoder = FrameEncoder()
    assert "kinds" in executor_of(encoder.encode(snapshot()))
    still = executor_of(encoder.encode(snapshot()))
    assert "kinds" not in still
    assert "ref_counts" not in still
    changed = executor_of(encoder.encode(snapshot(ref_counts=(3, 1, 0, 0, 1))))
    assert base64.b64decode(changed["ref_counts"])[0] == 3
    assert base64.b64decode(changed["kinds"]) == b"\x02\x02\x01\x00\x03"
    assert "kinds" in executor_of(FrameEncoder().encode(snapshot()))


def test_a_long_queue_is_cut_and_counted() -> None:
    """All that hold blocks are there; of those that wait, so many, and how many more."""
    executor = executor_of(FrameEncoder().encode(snapshot(num_waiting=MAX_IDLE_SEQUENCES + 5)))
    assert len(executor["sequences"]) == 2 + MAX_IDLE_SEQUENCES
    assert executor["num_more_sequences"] == 5
    assert [each["status"] for each in executor["sequences"][:3]] == [
        "running",
        "running",
        "waiting",
    ]


def test_a_line_has_no_field_that_could_carry_text() -> None:
    """Of a sequence: ids and counts, nothing else, whatever a snapshot may come to have."""
    executor = executor_of(FrameEncoder().encode(snapshot()))
    assert set(executor["sequences"][0]) == {
        "request_id",
        "sample_index",
        "row",
        "status",
        "num_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "tenant",
        "priority",
        "num_blocks",
    }
