"""Counter-based random numbers: keyed by place and token, equal everywhere."""

from __future__ import annotations

import math

import numpy as np
import torch

from executor_svc.draws import exponentials, keys

MASK = (1 << 64) - 1
MASK_32 = (1 << 32) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(state: int) -> int:
    """splitmix64 in unbounded integers, written down from its publication."""
    state = (state + GOLDEN) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def plain_keys(seed: int, index: int, position: int) -> tuple[int, int]:
    state = mix((seed + GOLDEN) & MASK)
    state = mix(state ^ (index * GOLDEN & MASK))
    state = mix(state ^ (position * GOLDEN & MASK))
    return state >> 32, state & MASK_32


def plain_exponential(token: int, key_0: int, key_1: int) -> float:
    """The documented formula in unbounded integers and float64."""
    x = (token * 0x9E3779B1 + key_0) & MASK_32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK_32
    x ^= key_1
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK_32
    x ^= x >> 16
    return -math.log1p(-((x & 0x7FFFFFFF) + 0.5) / 2**31)


PLACES = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (MASK, 3, 70_000), (12345, 15, 8191)]


def keys_of(places: list[tuple[int, int, int]]) -> np.ndarray:
    seeds, indices, positions = zip(*places, strict=True)
    return keys(np.array(seeds, np.uint64), np.array(indices), np.array(positions))


def test_splitmix64_is_the_published_one() -> None:
    """The reference used below gives the generator's well-known first output for seed 0."""
    assert mix(0) == 0xE220A8397B1DCDAF


def test_keys_equal_the_integer_definition() -> None:
    """Every place gives both halves of the chained hash, the largest seed too."""
    halves = keys_of(PLACES).view(np.uint32).tolist()
    assert halves == [list(plain_keys(*place)) for place in PLACES]


def test_exponentials_equal_the_integer_definition() -> None:
    """Wrapping int32 arithmetic and float32 logarithms give the documented number."""
    tokens = [0, 1, 2, 96, 49_151, 151_935]
    numbers = exponentials(
        torch.tensor(tokens, dtype=torch.int32), torch.from_numpy(keys_of(PLACES)[:, None])
    )
    expected = [
        [plain_exponential(token, *plain_keys(*place)) for token in tokens] for place in PLACES
    ]
    np.testing.assert_allclose(numbers.numpy(), expected, rtol=1e-6)


def test_a_number_depends_on_its_token_and_place_only() -> None:
    """Any choice of ids and rows, in any order, gives each pair the same number."""
    row_keys = torch.from_numpy(keys_of(PLACES)[:, None])
    ids = torch.arange(5000, dtype=torch.int32)
    whole = exponentials(ids, row_keys)
    few = torch.tensor([4999, 17, 256])
    np.testing.assert_allclose(
        exponentials(ids[few], row_keys[[4, 1]]), whole[[4, 1]][:, few], rtol=1e-6
    )


def test_numbers_are_finite_and_above_zero() -> None:
    """Over six million numbers none is 0, infinite or NaN: every race has a winner."""
    positions = np.arange(128)
    row_keys = keys(np.zeros(128, np.uint64), np.zeros(128, np.int64), positions)
    numbers = exponentials(
        torch.arange(49_152, dtype=torch.int32), torch.from_numpy(row_keys[:, None])
    )
    assert torch.isfinite(numbers).all()
    assert (numbers > 0).all()


def test_numbers_are_exponential_along_every_key() -> None:
    """Neighbouring seeds, samples, positions and tokens fill all sixteenths equally."""
    zeros, counting = np.zeros(16_000, np.int64), np.arange(16_000)
    one = torch.tensor([7], dtype=torch.int32)
    columns = [
        exponentials(one, torch.from_numpy(keys(places[0].astype(np.uint64), *places[1:])))
        for places in (
            (zeros, zeros, counting),
            (zeros, counting, zeros),
            (counting, zeros, zeros),
        )
    ]
    row_keys = torch.from_numpy(keys_of(PLACES)[:, None])
    columns += list(exponentials(torch.arange(16_000, dtype=torch.int32), row_keys))
    for numbers in columns:
        uniform = 1 - torch.exp(-numbers.flatten().double())
        counts = np.bincount((uniform * 16).int().numpy(), minlength=16)
        # Six standard deviations of a binomial (16000, 1/16).
        assert abs(counts - 1000).max() < 6 * np.sqrt(1000 * 15 / 16)


def test_neighbours_are_independent() -> None:
    """Numbers of adjacent tokens, and of one token at adjacent places, do not correlate."""
    row_keys = keys(np.full(64, 3, np.uint64), np.zeros(64, np.int64), np.arange(64))
    numbers = exponentials(
        torch.arange(4096, dtype=torch.int32), torch.from_numpy(row_keys[:, None])
    )
    ranks = 1 - torch.exp(-numbers.double()) - 0.5
    for product in (ranks[:, 1:] * ranks[:, :-1], ranks[1:] * ranks[:-1]):
        # Of a product of uniforms the standard deviation is 1/12.
        assert abs(float(product.mean())) < 5 / 12 / math.sqrt(product.numel())
