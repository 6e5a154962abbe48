"""Say at the end of the run how much of the scheduler core was driven."""

from __future__ import annotations

import pytest

from tests.support.core_harness import TOTALS

_SHOWN = (
    "num_steps",
    "num_recompute_preemptions",
    "num_swap_preemptions",
    "num_copied_blocks",
    "num_prefix_hit_tokens",
    "num_discarded_tokens",
    "num_resyncs",
)


def pytest_terminal_summary(terminalreporter):
    if not (TOTALS.transitions or TOTALS.notes):
        return
    terminalreporter.section("states and transitions")
    if TOTALS.transitions:
        terminalreporter.line(
            f"{TOTALS.transitions:,} transitions, the invariants checked after each; "
            f"{TOTALS.checked_reads:,} reads of slots, each the right one"
        )
        counts = (
            f"{name.removeprefix('num_')} {TOTALS.counters.get(name, 0):,}" for name in _SHOWN
        )
        terminalreporter.line(", ".join(counts))
    for line in TOTALS.notes:
        terminalreporter.line(line)


def pytest_collection_modifyitems(config, items):
    """Leave long forms out unless they are asked for by `-m slow`."""
    if "slow" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.skip(reason="long form: ask for it by -m slow"))
