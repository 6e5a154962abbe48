"""Steps that are launched before the tokens of the step before have come to the host.

On a CPU the tokens are there at once, but the executor does not use them before `collect`:
what reaches the next step is what it was fed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executor_svc.executor import Executor, Launched
from executor_svc.plan import Outcome, Plan, RowStart, Sampling, TableUpdate
from executor_svc.rows import RowTable

PROMPTS = {0: [5, 6, 7], 2: [9, 8, 7, 6, 5], 3: [11, 3]}
BLOCKS = {0: [4, 9], 2: [1, 7], 3: [2, 6]}


@pytest.fixture
def executor(load: Callable[..., Executor], tiny_llama: Path) -> Executor:
    return load(tiny_llama, num_blocks=16, block_size=16)


def start(row: int, **changed: Any) -> RowStart:
    values: dict[str, Any] = {
        "row": row,
        "tokens": PROMPTS[row],
        "num_prompt_tokens": len(PROMPTS[row]),
        "blocks": BLOCKS[row],
        "sampling": Sampling(temperature=0.0),
        **changed,
    }
    return RowStart(**values)


def prefill(rows: Sequence[int], **changed: Any) -> dict[str, Any]:
    """Fields of a plan that computes whole prompts."""
    return {
        "starts": [start(row, **changed) for row in rows],
        "chunk_rows": list(rows),
        "chunk_counts": [len(PROMPTS[row]) for row in rows],
    }


def run_ahead(executor: Executor, plans: Sequence[Plan]) -> list[Outcome]:
    """Launch each plan before the one before it is collected."""
    executor.reset()
    outcomes: list[Outcome] = []
    before: Launched | None = None
    for plan in plans:
        launched = executor.launch(plan)
        if before is not None:
            outcomes.append(executor.collect(before))
        before = launched
    assert before is not None
    return [*outcomes, executor.collect(before)]


def run_in_turn(executor: Executor, plans: Sequence[Plan]) -> list[Outcome]:
    executor.reset()
    return [executor.run(plan) for plan in plans]


def number(plans: Sequence[dict[str, Any]]) -> list[Plan]:
    return [Plan(epoch=1, step_id=step, **fields) for step, fields in enumerate(plans, 1)]


CASES = {
    "a steady set": [prefill([0, 2, 3]), {"decode_enter_rows": [0, 2, 3]}, *[{}] * 8],
    "rows come and go": [
        prefill([2]),
        {"decode_enter_rows": [2], **prefill([0])},
        {"decode_enter_rows": [0]},
        {},
        {"finish_rows": [2], **prefill([3])},
        {"decode_enter_rows": [3]},
        *[{}] * 4,
    ],
    "a number is used again at once": [
        prefill([0, 2]),
        {"decode_enter_rows": [0, 2]},
        {},
        # The new row 0 computes a token at the very position that the old one drew for.
        {
            "finish_rows": [0],
            "starts": [start(0, tokens=[5, 6, 7, 8, 9, 10], num_prompt_tokens=6)],
            "chunk_rows": [0],
            "chunk_counts": [6],
        },
        {"decode_enter_rows": [0]},
        *[{}] * 3,
    ],
    "a drawn token is computed as a chunk": [
        prefill([0, 2]),
        {"decode_enter_rows": [2], "chunk_rows": [0], "chunk_counts": [1]},
        {"chunk_rows": [0], "chunk_counts": [1]},
        {"decode_enter_rows": [0]},
        {},
    ],
    "samples fork from a prompt": [
        {**prefill([0]), "fork_parents": [0], "fork_rows": [5], "fork_sample_indices": [1]},
        {
            "decode_enter_rows": [0, 5],
            "table_updates": [TableUpdate(5, 0, [12])],
            "copy_sources": [4],
            "copy_destinations": [12],
        },
        {},
    ],
    "nothing is drawn for a while": [
        {"starts": [start(2)], "chunk_rows": [2], "chunk_counts": [2]},
        {"chunk_rows": [2], "chunk_counts": [2]},
        {"chunk_rows": [2], "chunk_counts": [1]},
        {"decode_enter_rows": [2]},
        {},
    ],
}


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(seed=7, top_p=0.9)])
@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_one_step_at_a_time(
    case: str, sampling: Sampling, executor: Executor
) -> None:
    """Whatever a plan does, running ahead changes no token."""
    fields = [
        {
            **each,
            "starts": [
                RowStart(**{**_fields(begun), "sampling": sampling})
                for begun in each.get("starts", [])
            ],
        }
        for each in CASES[case]
    ]
    plans = number(fields)
    expected = run_in_turn(executor, plans)
    found = run_ahead(executor, plans)
    assert [outcome.error for outcome in expected] == [None] * len(plans)
    assert [outcome.tokens for outcome in found] == [outcome.tokens for outcome in expected]
    assert any(outcome.tokens for outcome in found)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, repetition_penalty=1.8),
        Sampling(seed=3, presence_penalty=1.5, frequency_penalty=0.7),
    ],
)
def test_penalties_see_every_token(sampling: Sampling, executor: Executor) -> None:
    """What a penalty counts is settled first."""
    plans = number([prefill([0, 2], sampling=sampling), {"decode_enter_rows": [0, 2]}, *[{}] * 10])
    expected = [outcome.tokens for outcome in run_in_turn(executor, plans)]
    assert [outcome.tokens for outcome in run_ahead(executor, plans)] == expected


def test_the_sanitizer_sees_every_token(load: Callable[..., Executor], tiny_llama: Path) -> None:
    """Its tags are made of tokens, so it waits for them."""
    executor = load(tiny_llama, num_blocks=16, block_size=16, kv_check=True)
    plans = number(CASES["a steady set"])
    expected = run_in_turn(executor, plans)
    found = run_ahead(executor, plans)
    assert [outcome.error for outcome in found] == [None] * len(plans)
    assert [outcome.tokens for outcome in found] == [outcome.tokens for outcome in expected]


def test_the_host_is_not_asked_for_tokens(executor: Executor) -> None:
    """In a steady set the next step is laid out without what the row table lacks."""
    plans = number(CASES["a steady set"])
    expected = [outcome.tokens for outcome in run_in_turn(executor, plans)]
    executor.reset()
    for plan in plans[:2]:
        executor.run(plan)
    third = executor.launch(plans[2])
    table: RowTable = executor._rows
    live = np.flatnonzero(table.live)
    last = (live, table.num_tokens[live] - 1)
    table.tokens[last] = 0  # as if nobody knew
    fourth = executor.launch(plans[3])
    assert executor.collect(third).tokens == expected[2]
    assert table.tokens[last].tolist() == expected[2]
    assert executor.collect(fourth).tokens == expected[3]


def test_a_late_token_stays_out_of_another_row(executor: Executor) -> None:
    """A row that ended is not written to under the number that another one has now."""
    plans = number(
        [
            prefill([0]),
            {"decode_enter_rows": [0]},
            {
                "finish_rows": [0],
                "starts": [start(0, tokens=[5, 6, 7, 8, 9, 10], num_prompt_tokens=6)],
                "chunk_rows": [0],
                "chunk_counts": [2],
            },
        ]
    )
    executor.reset()
    executor.run(plans[0])
    second = executor.launch(plans[1])
    third = executor.launch(plans[2])
    executor.collect(second)
    executor.collect(third)
    assert executor._rows.tokens[0, :6].tolist() == [5, 6, 7, 8, 9, 10]


def test_a_step_that_fails_leaves_the_one_before_it(executor: Executor) -> None:
    """Its tokens were drawn before anything was wrong."""
    good, bad = number([prefill([0]), {"decode_enter_rows": [6]}])
    executor.reset()
    expected = executor.run(good).tokens
    executor.reset()
    first = executor.launch(good)
    second = executor.launch(bad)
    assert executor.collect(first).tokens == expected
    error = executor.collect(second).error
    assert error is not None
    assert "row 6 does not exist" in error.message
    assert executor.num_rows == 0


def _fields(begun: RowStart) -> dict[str, Any]:
    return {name: getattr(begun, name) for name in RowStart.__dataclass_fields__}
