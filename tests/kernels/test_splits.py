"""How decode cuts contexts, by what it leaves idle."""

from __future__ import annotations

import pytest
from octavo_kernels.triton_ops.splits import MAX_SPLITS, choose_num_splits

A100, H100, B200 = 108, 132, 148


@pytest.mark.parametrize("processors", [A100, H100, B200])
def test_full_devices_are_not_split(processors: int) -> None:
    """Where sequences and heads give every processor several programs, one split serves."""
    assert choose_num_splits(256, 8, 32768, processors) == 1
    assert choose_num_splits(64, 32, 1024, processors) == 1


@pytest.mark.parametrize("processors", [A100, H100, B200])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 4, 8])
def test_one_long_sequence_keeps_most_processors_busy(num_kv_heads: int, processors: int) -> None:
    """Alone, a sequence is cut until most processors have a program, or as far as is allowed."""
    splits = choose_num_splits(1, num_kv_heads, 131072, processors)
    assert splits * num_kv_heads > 0.8 * min(processors, MAX_SPLITS * num_kv_heads)


def test_short_contexts_stay_whole() -> None:
    """Below two pieces of 256 tokens there is nothing to cut; above, no piece is smaller."""
    assert choose_num_splits(1, 8, 1, H100) == 1
    assert choose_num_splits(1, 8, 511, H100) == 1
    assert choose_num_splits(1, 8, 512, H100) == 2
    for context in (700, 1024, 3000, 8192):
        assert context // choose_num_splits(1, 8, context, H100) >= 256


def test_a_wave_with_few_programs_is_avoided() -> None:
    """One program too many for a single wave of two a processor costs a wave: cut them."""
    assert choose_num_splits(2 * H100, 1, 8192, H100) == 1
    splits = choose_num_splits(2 * H100 + 1, 1, 8192, H100)
    waves = (2 * H100 + 1) * splits / (2 * H100)
    assert splits > 1
    assert waves / -(-waves // 1) > 0.8
