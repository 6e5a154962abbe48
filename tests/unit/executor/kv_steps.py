"""Rows and their sanitizer, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from executor_svc.batch import build_batch
from executor_svc.kv_check import KvCheck
from executor_svc.plan import Plan, RowStart
from executor_svc.rows import Limits, RowTable

PROMPT = list(range(10, 22))  # a full block of 8 and half of the next one
ALICE, BOB = 0xA11CE, 0xB0B


class Steps:
    """Runs plans one after the other; the test says what is drawn."""

    def __init__(self, limits: Limits) -> None:
        self.rows = RowTable(limits)
        self.kv_check = KvCheck(limits)
        self.step_id = 0

    def __call__(self, *, drawn: Sequence[int] = (), **fields: Any) -> None:
        """Run one plan; `drawn` are the tokens of the rows that draw, by ascending row."""
        self.step_id += 1
        plan = Plan(step_id=self.step_id, **fields)
        self.rows.apply(plan)
        batch = build_batch(self.rows, plan)
        self.kv_check.check(plan, self.rows, batch)
        beams = self.rows.state["num_beam_candidates"][batch.sample_rows] > 0
        self.rows.append_tokens(batch.sample_rows[~beams], np.asarray(drawn, np.int64))

    def prefill(
        self, row: int, tokens: list[int], blocks: list[int], lineage: int = ALICE, **fields: Any
    ) -> None:
        """Start a row and compute all that is not said to be computed."""
        num_computed = fields.pop("num_computed_tokens", 0)
        start = RowStart(
            row,
            tokens,
            len(tokens),
            blocks,
            num_computed_tokens=num_computed,
            lineage=lineage,
            num_beam_candidates=fields.pop("num_beam_candidates", 0),
        )
        self(
            starts=[start],
            chunk_rows=[row],
            chunk_counts=[len(tokens) - num_computed],
            **{"drawn": [50], **fields},
        )


def fork_of_a_prompt(steps: Steps) -> None:
    """Rows 0 and 2 share blocks 4 and 5, have drawn 60 and 62, and are to write slot 12."""
    steps(
        starts=[RowStart(0, PROMPT, len(PROMPT), [4, 5], lineage=ALICE)],
        chunk_rows=[0],
        chunk_counts=[len(PROMPT)],
        fork_parents=[0],
        fork_rows=[2],
        fork_sample_indices=[1],
        drawn=[60, 62],
    )


def swapped_out(steps: Steps) -> None:
    """Rows 0 and 1 are on the host, in blocks 0, 1 and 2, 3; their device blocks are reused."""
    steps.prefill(0, PROMPT, [4, 5])
    steps.prefill(1, PROMPT[::-1], [6, 7], BOB)
    steps(swap_out_device_blocks=[4, 5, 6, 7], swap_out_host_blocks=[0, 1, 2, 3])
    steps.prefill(2, list(range(30, 60)), [4, 5, 6, 7], BOB)
    steps(finish_rows=[2])
