"""What the studies beyond the paper have in common."""

from __future__ import annotations

from dataclasses import replace

from scheduler_svc.simulator import DEVICES, MODELS, Report, RequestTable, Roofline

PAGE = "beyond.md"

BLOCK_OVERHEAD_TOKENS = 0.8
"""What fetching a block of 16 costs Octavo's own kernel, in tokens: 5%, the bar that it is held
to, where the paper's kernel takes 4."""


def own_roofline(model: str, device: str, num_gpus: int = 1, block_size: int = 16) -> Roofline:
    """Step times with Octavo's kernel, and blocks that move in one copy."""
    return Roofline(
        MODELS[model],
        DEVICES[device],
        num_gpus,
        block_size,
        block_overhead_tokens=BLOCK_OVERHEAD_TOKENS,
        transfers_per_block=1,
    )


def slim(report: Report) -> Report:
    """Leave out the tables, which are long, for the way between processes."""
    return replace(report, requests=RequestTable(), timeline=[])


def seconds(value: float) -> str:
    """For a cell."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def percent(share: float) -> str:
    """For a cell."""
    return f"{share:.1%}" if share >= 0.001 or share == 0 else f"{share:.5%}"


def quantile(values: list[float], share: float) -> float:
    """Value below which this share lies, as `Spread` takes it; 0.0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
