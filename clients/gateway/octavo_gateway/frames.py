"""Snapshots as the console's page reads them: one line of JSON each, arrays packed.

    {"scheduler_id", "time_ms", "latency": {…}, "executors": [{
        "address", "connected", …, "pool": {…}, "counters": {…},
        "sequences": [{"request_id", "sample_index", "status", …, "num_blocks"}],
        "num_more_sequences", "tables", "kinds", "ref_counts", "steps": [{…}]}]}

`kinds` and `ref_counts` have a byte for each block, `tables` has the block tables of all
sequences one after the other, as 32-bit numbers, little-endian; all three are base64. Who
owns a block follows from the tables, so it is not said twice. An executor whose kinds and
counts are those of the line before leaves them out.

A frame has ids and counts, never a text or a token.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from octavo_client import Blocks, Executor, SequenceInfo, Snapshot
from pydantic_core import to_json

MAX_IDLE_SEQUENCES = 256  # that hold no blocks: the queue may be long
_MAX_COUNT = 255
_NS_PER_MS = 1_000_000
_PLAIN = (
    "address",
    "connected",
    "draining",
    "epoch",
    "step_id",
    "num_queued",
    "num_running",
    "num_preempted",
    "num_draining_rows",
    "load_tokens",
)


class FrameEncoder:
    """Writes the snapshots of one watch.

    Invariant: what a line leaves out is, at its reader, as the last line that had it said.
    """

    def __init__(self) -> None:
        self._sent: dict[str, Blocks] = {}  # by executor's address

    def encode(self, snapshot: Snapshot) -> bytes:
        """Give one line, without its end."""
        before, self._sent = self._sent, {each.address: each.blocks for each in snapshot.executors}
        frame = {
            "scheduler_id": snapshot.scheduler_id,
            "time_ms": snapshot.time_unix_ns / _NS_PER_MS,
            "latency": asdict(snapshot.latency),
            "executors": [_executor(each, before.get(each.address)) for each in snapshot.executors],
        }
        return to_json(frame)


def _executor(executor: Executor, before: Blocks | None) -> dict[str, Any]:
    shown, num_more = _shown(executor.sequences)
    tables = [each.block_table for each in shown]
    frame: dict[str, Any] = {name: getattr(executor, name) for name in _PLAIN}
    frame |= {
        "pool": asdict(executor.pool),
        "counters": asdict(executor.counters),
        "sequences": [_sequence(each) for each in shown],
        "num_more_sequences": num_more,
        "tables": _packed(tables),
        "steps": [asdict(step) for step in executor.steps],
    }
    if executor.blocks != before:
        frame["kinds"] = _base64(executor.blocks.kinds)
        frame["ref_counts"] = _base64(_clamped(executor.blocks.ref_counts))
    return frame


def _shown(sequences: tuple[SequenceInfo, ...]) -> tuple[list[SequenceInfo], int]:
    """Give those with blocks, the first of the others, and how many are left out."""
    holding = [each for each in sequences if each.block_table]
    idle = [each for each in sequences if not each.block_table]
    return holding + idle[:MAX_IDLE_SEQUENCES], max(len(idle) - MAX_IDLE_SEQUENCES, 0)


def _sequence(sequence: SequenceInfo) -> dict[str, Any]:
    return {
        "request_id": sequence.request_id,
        "sample_index": sequence.sample_index,
        "row": sequence.row,
        "status": sequence.status,
        "num_tokens": sequence.num_tokens,
        "num_computed_tokens": sequence.num_computed_tokens,
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "tenant": sequence.tenant,
        "priority": sequence.priority,
        "num_blocks": len(sequence.block_table),
    }


def _packed(tables: Iterable[tuple[int, ...]]) -> str:
    numbers = array("I")
    for table in tables:
        numbers.extend(table)
    if sys.byteorder == "big":
        numbers.byteswap()
    return _base64(numbers.tobytes())


def _clamped(counts: tuple[int, ...]) -> bytes:
    try:
        return bytes(counts)
    except ValueError:  # one is larger than a byte
        return bytes(min(count, _MAX_COUNT) for count in counts)


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
