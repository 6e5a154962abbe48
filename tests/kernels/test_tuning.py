"""The table of layouts, and what stands in for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from octavo_kernels.triton_ops.tuning import (
    Tuning,
    TuningKey,
    default_tuning,
    read_table,
    tuning_for,
)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "gfx942"])
def test_default_tiles_are_of_bounded_size(arch: str, head_dim: int, itemsize: int) -> None:
    """A tile is up to 16 KiB of keys, more than half of it unless it has 64 tokens."""
    tile = default_tuning(arch, head_dim, itemsize).tile_tokens
    assert 16 <= tile <= 64
    assert tile * head_dim * itemsize <= 16 * 1024
    assert tile == 64 or tile * head_dim * itemsize > 8 * 1024


def test_a_measured_layout_goes_before_the_default(tmp_path: Path) -> None:
    """An entry serves its own card, shape and 16-bit pools; all else falls back."""
    entry = {"arch": "sm_90", "head_dim": 128, "block_size": 16, "group": 4}
    layout = {"tile_tokens": 256, "num_warps": 8, "num_stages": 2}
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps([entry | layout]))
    table = read_table(path)
    key = TuningKey("sm_90", 128, 16, 4)
    assert tuning_for(key, torch.bfloat16, table) == Tuning(256, 8, 2)
    assert tuning_for(key, torch.float32, table) == default_tuning("sm_90", 128, 4)
    for other in (TuningKey("sm_80", 128, 16, 4), TuningKey("sm_90", 128, 32, 4)):
        assert tuning_for(other, torch.float16, table) == default_tuning(other.arch, 128, 2)
