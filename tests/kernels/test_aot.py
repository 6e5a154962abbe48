"""The kernels' binaries for GPUs that are not here, as `make aot` makes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from itertools import product
from typing import Any

import pytest
from octavo_kernels.aot.bar import Bar

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
ATTENTION = ("paged_attention", "prefill_attention")
KERNELS = (*ATTENTION, "reshape_and_cache", "copy_blocks", "swap_blocks")


def run_aot(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that compiles: these tests' own interprets kernels."""
    inherited = {name: each for name, each in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "octavo_kernels.aot", *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def compile_rows(*arguments: str) -> list[dict[str, Any]]:
    """Compile, require that nothing is worse than the table, and return the rows."""
    done = run_aot(*arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_rows(rows: list[dict[str, Any]]) -> None:
    """Require what holds for all of them, whatever the table says.

    Paging's share is the compiler's own; it is asked of the version that wrote the table.
    """
    known_compiler = version("triton") == Bar.read().triton
    compiled = {(row["kernel"], row["target"]) for row in rows}
    assert set(product(KERNELS, TARGETS)) <= compiled
    for row in rows:
        assert row["spills"] == 0, row
        assert 0 < row["registers"] <= 512, row
        if row["kernel"] in KERNELS:  # what merges splits reads no K/V
            assert row["load_bits"] >= 128, row
        if row["kernel"] in ATTENTION:
            assert row["inner_loop_instructions"] > 0, row
            assert row["kv_bytes_per_iteration"] > 0, row
            if known_compiler and row["block_size"] == 16:
                assert row["paging_overhead"] <= 0.05, row


def test_one_model_for_every_target():
    """Each kernel compiles for each target as good as the table has it; paging costs ≤ 5%."""
    check_rows(compile_rows("--config", "SmolLM2-135M", "--block-size", "16"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_model_for_every_target():
    """So do the kernels of five real models, over small and large blocks."""
    check_rows(compile_rows())


def test_the_interpreter_is_refused():
    """Under TRITON_INTERPRET nothing would be compiled; the command says so."""
    done = run_aot(TRITON_INTERPRET="1")
    assert done.returncode == 2
    assert "TRITON_INTERPRET" in done.stderr
