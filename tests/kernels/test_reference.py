"""The specification itself, against dense attention written out in float64.

Every slot outside the contexts is NaN, so that one read too far spoils the result.
"""

from __future__ import annotations

import math

import pytest
import torch
from octavo_kernels import reference
from torch import Tensor

# (query heads, KV heads, head_dim)
SHAPES = [(4, 4, 16), (9, 3, 64), (8, 1, 40)]


class Pool:
    """Random contexts scattered over a pool; `keys[i]` and `values[i]` are [length, ...]."""

    def __init__(
        self, lengths: list[int], num_kv_heads: int, head_dim: int, block_size: int, seed: int = 0
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks, generator=random).tolist()
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.key_cache, self.value_cache = (
            torch.full(shape, torch.nan),
            torch.full(shape, torch.nan),
        )
        # Entries past the context name no block at all.
        self.tables = torch.full((len(lengths), max(needed) + 1), 10**6, dtype=torch.int32)
        self.lengths = torch.tensor(lengths)
        self.keys, self.values = [], []
        for index, length in enumerate(lengths):
            blocks = [order.pop() for _ in range(needed[index])]
            self.tables[index, : len(blocks)] = torch.tensor(blocks)
            slots = torch.tensor(
                [blocks[p // block_size] * block_size + p % block_size for p in range(length)]
            )
            key = torch.randn(length, num_kv_heads, head_dim, generator=random)
            value = torch.randn(length, num_kv_heads, head_dim, generator=random)
            reference.reshape_and_cache(key, value, self.key_cache, self.value_cache, slots)
            self.keys.append(key)
            self.values.append(value)


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend [n, heads, dim], the last n of the context, one query and head at a time."""
    out = torch.empty(query.shape, dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for place in range(len(query)):
        position = len(key) - len(query) + place
        first = 0 if sliding_window is None else max(0, position + 1 - sliding_window)
        for head in range(query.shape[1]):
            seen = slice(first, position + 1)
            scores = key[seen, head // group].double() @ query[place, head].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[place, head] = torch.softmax(scores, 0) @ value[seen, head // group].double()
    return out


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("sliding_window", "softcap"), [(None, None), (20, None), (20, 5.0)])
def test_decode_equals_dense_attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    """One new token per sequence, over lengths that fall into several buckets."""
    lengths = [1, block_size, block_size + 1, 33, 130, 300]
    pool = Pool(lengths, num_kv_heads, head_dim, block_size)
    query = torch.randn(len(lengths), num_heads, head_dim)
    scale = 1 / math.sqrt(head_dim)
    got = reference.paged_attention(
        query,
        pool.key_cache,
        pool.value_cache,
        pool.tables,
        pool.lengths,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    for index in range(len(lengths)):
        expected = dense(
            query[index : index + 1],
            pool.keys[index],
            pool.values[index],
            scale,
            sliding_window,
            softcap,
        )
        torch.testing.assert_close(got[index].double(), expected[0], atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("sliding_window", "softcap"), [(None, None), (7, None), (None, 3.0)])
def test_chunks_equal_dense_attention(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    """Whole prompts, and chunks behind a prefix, are causal over prefix and chunk."""
    lengths, counts = [5, 24, 33, 17], [5, 9, 1, 16]
    pool = Pool(lengths, num_kv_heads, head_dim, block_size, seed=1)
    query = torch.randn(sum(counts), num_heads, head_dim)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    scale = 0.2
    got = reference.prefill_attention(
        query,
        pool.key_cache,
        pool.value_cache,
        pool.tables,
        query_starts=starts,
        context_lens=pool.lengths,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    for index in range(len(lengths)):
        chunk = slice(int(starts[index]), int(starts[index + 1]))
        expected = dense(
            query[chunk], pool.keys[index], pool.values[index], scale, sliding_window, softcap
        )
        torch.testing.assert_close(got[chunk].double(), expected, atol=2e-6, rtol=2e-5)


def test_bfloat16_stays_close() -> None:
    """In bfloat16 the result is within its own rounding of dense attention."""
    pool = Pool([40, 300], 2, 32, 16)
    query = torch.randn(2, 4, 32).bfloat16()
    got = reference.paged_attention(
        query,
        pool.key_cache.bfloat16(),
        pool.value_cache.bfloat16(),
        pool.tables,
        pool.lengths,
        scale=0.1,
    )
    assert got.dtype == torch.bfloat16
    for index in range(2):
        expected = dense(
            query[index : index + 1], pool.keys[index], pool.values[index], 0.1, None, None
        )
        torch.testing.assert_close(got[index].double(), expected[0], atol=2e-2, rtol=2e-2)


def test_a_sequence_does_not_feel_the_batch() -> None:
    """Beside a far longer sequence a short one gets the same result as alone, bit for bit."""
    pool = Pool([19, 300], 2, 32, 16)
    query = torch.randn(2, 4, 32)
    arguments = (pool.key_cache, pool.value_cache)
    both = reference.paged_attention(query, *arguments, pool.tables, pool.lengths, scale=0.1)
    alone = reference.paged_attention(
        query[:1], *arguments, pool.tables[:1], pool.lengths[:1], scale=0.1
    )
    assert torch.equal(both[0], alone[0])


def test_writes_touch_their_slots_only() -> None:
    """New K/V land in the named slots; every other slot keeps what it had."""
    cache = torch.arange(4 * 8 * 2 * 3, dtype=torch.float32).view(4, 8, 2, 3)
    keys, values = cache.clone(), -cache
    new = torch.full((3, 2, 3), 0.5)
    reference.reshape_and_cache(new, new * 2, keys, values, torch.tensor([31, 0, 9]))
    flat = keys.view(32, 2, 3)
    assert torch.equal(flat[[31, 0, 9]], new)
    assert torch.equal(values.view(32, 2, 3)[[31, 0, 9]], new * 2)
    others = [slot for slot in range(32) if slot not in {31, 0, 9}]
    assert torch.equal(flat[others], cache.view(32, 2, 3)[others])


def test_copies_cover_all_layers_and_nothing_else() -> None:
    """A copied block equals its source in every layer, keys and values; others stay."""
    pool = torch.randn(3, 2, 6, 8, 2, 4)
    before = pool.clone()
    reference.copy_blocks(pool, torch.tensor([0, 0, 4]), torch.tensor([1, 5, 2]))
    for source, destination in [(0, 1), (0, 5), (4, 2)]:
        assert torch.equal(pool[:, :, destination], before[:, :, source])
    assert torch.equal(pool[:, :, [0, 3, 4]], before[:, :, [0, 3, 4]])


def test_swapping_out_and_in_moves_bytes_unchanged() -> None:
    """Blocks come back from a second pool bit for bit, NaN payloads included."""
    device, host = torch.randn(2, 2, 5, 8, 1, 4), torch.zeros(2, 2, 3, 8, 1, 4)
    device[0, 0, 4, 0, 0, 0] = torch.nan
    before = device.clone()
    reference.swap_blocks(device, host, torch.tensor([4, 1]), torch.tensor([0, 2]))
    device[:, :, [1, 4]] = 0
    reference.swap_blocks(host, device, torch.tensor([0, 2]), torch.tensor([3, 0]))
    bits, original = device.view(torch.int32), before.view(torch.int32)
    assert torch.equal(bits[:, :, [3, 0]], original[:, :, [4, 1]])


def test_disagreeing_shapes_are_refused() -> None:
    """Heads that do not divide, a missing slot and another dtype are errors, not garbage."""
    pool = Pool([5], 2, 16, 8)
    caches = (pool.key_cache, pool.value_cache)
    with pytest.raises(ValueError, match="do not share"):
        reference.paged_attention(
            torch.zeros(1, 3, 16), *caches, pool.tables, pool.lengths, scale=1.0
        )
    with pytest.raises(ValueError, match=r"^query .* is not of shape"):
        reference.paged_attention(
            torch.zeros(1, 4, 8), *caches, pool.tables, pool.lengths, scale=1.0
        )
    new = torch.zeros(2, 2, 16)
    with pytest.raises(ValueError, match="one slot per token"):
        reference.reshape_and_cache(new, new, *caches, torch.tensor([1]))
    with pytest.raises(ValueError, match="dtype"):
        reference.reshape_and_cache(new.half(), new.half(), *caches, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="2 sources for 1"):
        reference.copy_blocks(
            torch.zeros(1, 2, 4, 8, 1, 1), torch.tensor([0, 1]), torch.tensor([2])
        )
