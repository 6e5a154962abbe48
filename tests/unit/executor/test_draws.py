"""Counter-based random numbers: keyed by place, equal everywhere."""

from __future__ import annotations

import numpy as np

from executor_svc.draws import uniforms

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(state: int) -> int:
    """splitmix64 in unbounded integers, written down from its publication."""
    state = (state + GOLDEN) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_splitmix64_is_the_published_one() -> None:
    """The reference used below gives the generator's well-known first output for seed 0."""
    assert mix(0) == 0xE220A8397B1DCDAF


def test_draws_equal_the_integer_definition() -> None:
    """Every key gives the chained hash's upper 53 bits, the largest seed too."""
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (MASK, 3, 70_000), (12345, 15, 8191)]
    expected = []
    for seed, index, position in keys:
        state = mix((seed + GOLDEN) & MASK)
        state = mix(state ^ (index * GOLDEN & MASK))
        state = mix(state ^ (position * GOLDEN & MASK))
        expected.append((state >> 11) / 2**53)
    seeds, indices, positions = zip(*keys, strict=True)
    drawn = uniforms(np.array(seeds, np.uint64), np.array(indices), np.array(positions))
    assert drawn.tolist() == expected


def test_draws_are_uniform_over_positions_seeds_and_samples() -> None:
    """Along each key, neighbours fill all sixteen sixteenths about equally."""
    zeros, counting = np.zeros(16_000, np.int64), np.arange(16_000)
    for keys in (
        (zeros, zeros, counting),
        (zeros, counting, zeros),
        (counting, zeros, zeros),
    ):
        drawn = uniforms(keys[0].astype(np.uint64), keys[1], keys[2])
        counts = np.bincount((drawn * 16).astype(int), minlength=16)
        # Six standard deviations of a binomial (16000, 1/16).
        assert abs(counts - 1000).max() < 6 * np.sqrt(1000 * 15 / 16)
