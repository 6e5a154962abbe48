"""The committed table: what fails against it, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from octavo_kernels.aot.bar import Bar, changes, compare, key_of


def row(**changed: Any) -> dict[str, Any]:
    return {
        "kernel": "paged_attention",
        "target": "sm_90",
        "config": "Llama-3.1-8B",
        "dtype": "bfloat16",
        "block_size": 16,
        "registers": 100,
        "spills": 0,
        "stack_bytes": 0,
        "shared_bytes": 1024,
        "load_bits": 128,
        "instructions_per_kv_byte": 0.05,
        "paging_overhead": 0.02,
        **changed,
    }


def bar() -> Bar:
    return Bar("3.7.1", {key_of(row()): row()})


def problems(now: dict[str, Any], triton: str = "3.7.1") -> list[str]:
    return compare([now], bar(), triton=triton, complete=True)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"spills": 8}, "spills 8 bytes"),
        ({"load_bits": 64}, "loads 64 bits at a time, not 128"),
        ({"registers": 109}, "registers 100 -> 109"),
        ({"paging_overhead": 0.03}, "paging_overhead 0.02 -> 0.03"),
        ({"paging_overhead": None}, "paging_overhead 0.02 -> None"),
        ({"target": "sm_80"}, "not in the table"),
        ({"target": "sm_80"}, "in the table alone"),
    ],
)
def test_worse_binaries_are_named(changed: dict[str, Any], said: str):
    """Every way to be worse yields a line that says what and where."""
    (line,) = [line for line in problems(row(**changed)) if said in line]
    assert "paged_attention on sm_" in line
    assert "Llama-3.1-8B" in line


@pytest.mark.parametrize(
    "changed", [{}, {"registers": 108}, {"registers": 40}, {"paging_overhead": -0.01}]
)
def test_as_good_or_better_passes(changed: dict[str, Any]):
    """A few registers more are no regression, fewer are none either."""
    assert problems(row(**changed)) == []


def test_another_triton_is_held_to_the_hard_rules_alone():
    """Registers are another compiler's own; spills are nobody's right."""
    assert problems(row(registers=200, paging_overhead=0.5), triton="3.6.0") == []
    assert problems(row(spills=4), triton="3.6.0") != []


def test_a_partial_run_may_leave_rows_out():
    """Only a run of all cases can say that a row of the table is stale."""
    assert compare([], bar(), triton="3.7.1", complete=False) == []
    assert len(compare([], bar(), triton="3.7.1", complete=True)) == 1


def test_table_survives_writing(tmp_path: Path):
    """What is written is read again, and each row has a line."""
    path = tmp_path / "table.json"
    bar().write(path)
    assert Bar.read(path) == bar()
    assert len(path.read_text().splitlines()) == 3


def test_changes_say_better_or_worse():
    """Fewer bits are worse, fewer registers better, and a row may be new."""
    lines = changes([row(registers=90, load_bits=64), row(target="sm_80")], bar())
    assert [line.split()[0] for line in lines] == ["better", "worse", "new"]
