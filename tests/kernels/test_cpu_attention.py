"""Compiled attention against float64, over a pool where every slot not to be read is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from octavo_kernels.cpu.ops import paged_attention, prefill_attention, reshape_and_cache
from octavo_kernels.cpu.plans import plan_decode, why_unsupported
from torch import Tensor

from tests.kernels.support import TOLERANCES, PagedContexts

BF16, F32 = torch.bfloat16, torch.float32
SCALE = 0.3

# Group, KV heads, head_dim, block size, dtype, window, soft-cap. Block sizes need be no
# power of two here.
CASES = [
    (1, 3, 64, 16, BF16, None, None),
    (2, 1, 128, 8, F32, None, None),
    (3, 3, 64, 16, BF16, 33, None),
    (3, 2, 80, 32, F32, None, 5.0),
    (4, 2, 128, 32, BF16, 20, None),
    (5, 1, 96, 20, F32, 1, None),
    (7, 1, 256, 64, BF16, None, 30.0),
    (8, 1, 16, 128, F32, 100, 2.0),
    (9, 2, 48, 8, BF16, None, None),
    (16, 1, 112, 16, F32, 64, None),
    (1, 2, 256, 128, F32, 65, 50.0),
    (4, 1, 80, 64, BF16, None, None),
]
columns = pytest.mark.parametrize(
    ("group", "num_kv_heads", "head_dim", "block_size", "dtype", "window", "softcap"), CASES
)


def decode(contexts: PagedContexts, query: Tensor, **options: Any) -> Tensor:
    """Run the decode kernel into an output full of NaN."""
    out = torch.full_like(query, torch.nan)
    got = paged_attention(
        query,
        contexts.key_cache,
        contexts.value_cache,
        contexts.tables,
        contexts.lengths,
        out=out,
        **options,
    )
    assert got is out
    return out


def prefill(contexts: PagedContexts, query: Tensor, counts: list[int], **options: Any) -> Tensor:
    """Run the prefill kernel into an output full of NaN."""
    out = torch.full_like(query, torch.nan)
    got = prefill_attention(
        query,
        contexts.key_cache,
        contexts.value_cache,
        contexts.tables,
        query_starts=torch.tensor([0, *counts]).cumsum(0),
        context_lens=contexts.lengths,
        out=out,
        **options,
    )
    assert got is out
    return out


def random_query(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, num_heads, head_dim, generator=random).to(dtype)


@columns
def test_decode_equals_float64(
    group: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    """Context 1, full and partial last blocks, padding, several splits, shared blocks."""
    lengths = [1, block_size, 0, block_size + 1, 33, 290]
    contexts = PagedContexts(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        shared_blocks=2,
    )
    query = random_query(len(lengths), group * num_kv_heads, head_dim, dtype)
    options = {"scale": SCALE, "sliding_window": window, "softcap": softcap}
    got = decode(contexts, query, **options)
    for index in range(len(lengths)):
        expected = contexts.attend(index, query[index : index + 1], **options)
        torch.testing.assert_close(got[index].double(), expected[0], **TOLERANCES[dtype])


@columns
def test_chunks_equal_float64(
    group: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    """Whole prompts, chunks after a prefix, one token, a chunk across two tiles of keys."""
    lengths, counts = [1, block_size + 1, 70, 131], [1, block_size + 1, 3, 5]
    contexts = PagedContexts(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    query = random_query(sum(counts), group * num_kv_heads, head_dim, dtype)
    options = {"scale": SCALE, "sliding_window": window, "softcap": softcap}
    got = prefill(contexts, query, counts, **options)
    for index, (queries, result) in enumerate(
        zip(query.split(counts), got.split(counts), strict=True)
    ):
        expected = contexts.attend(index, queries, **options)
        torch.testing.assert_close(result.double(), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_nothing_before_the_window_is_read(dtype: torch.dtype) -> None:
    """A window lets go of its oldest tokens; their blocks may be anyone's."""
    window, lengths, counts = 37, [200, 37, 300], [30, 5, 1]
    shape = {"num_kv_heads": 1, "head_dim": 32, "block_size": 8}
    contexts = PagedContexts(lengths, **shape, dtype=dtype)
    options = {"scale": SCALE, "sliding_window": window}
    query = random_query(sum(counts), 3, 32, dtype)
    expected = [
        contexts.attend(index, queries, **options)
        for index, queries in enumerate(query.split(counts))
    ]
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        contexts.poison_before(index, length - count + 1 - window)
    got = prefill(contexts, query, counts, **options)
    torch.testing.assert_close(got.double(), torch.cat(expected), **TOLERANCES[dtype])
    contexts = PagedContexts(lengths, **shape, dtype=dtype)
    for index, length in enumerate(lengths):
        contexts.poison_before(index, length - window)
    newest = query[torch.tensor(counts).cumsum(0) - 1]
    got = decode(contexts, newest, **options)
    torch.testing.assert_close(
        got.double(), torch.stack([each[-1] for each in expected]), **TOLERANCES[dtype]
    )


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_threads_and_batch_change_no_bit(dtype: torch.dtype) -> None:
    """A row comes out the same alone or in a batch, and from any number of threads."""
    lengths = [700, 1, 256, 513]
    contexts = PagedContexts(lengths, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    query = random_query(len(lengths), 6, 64, dtype)
    together = decode(contexts, query, scale=SCALE)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(decode(contexts, query, scale=SCALE), together)
    finally:
        torch.set_num_threads(before)
    for index in range(len(lengths)):
        alone = paged_attention(
            query[index : index + 1],
            contexts.key_cache,
            contexts.value_cache,
            contexts.tables[index : index + 1],
            contexts.lengths[index : index + 1],
            scale=SCALE,
        )
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("window", [None, 50])
def test_chunking_changes_no_bit(window: int | None) -> None:
    """A prompt computed in chunks of any size comes out as in one piece."""
    contexts = PagedContexts([150], num_kv_heads=2, head_dim=64, block_size=16, dtype=F32)
    query = random_query(150, 6, 64, F32)
    whole = prefill(contexts, query, [150], scale=SCALE, sliding_window=window)
    for begin, end in ((0, 1), (1, 30), (30, 64), (64, 150)):
        part = prefill_attention(
            query[begin:end],
            contexts.key_cache,
            contexts.value_cache,
            contexts.tables,
            query_starts=torch.tensor([0, end - begin]),
            context_lens=torch.tensor([end]),
            scale=SCALE,
            sliding_window=window,
        )
        assert torch.equal(part, whole[begin:end])


def test_a_plan_serves_every_layer() -> None:
    """One plan runs over pools of other values, splits and all, with other strides."""
    plan = None
    for seed in range(3):
        contexts = PagedContexts(
            [600, 5], num_kv_heads=1, head_dim=32, block_size=16, dtype=F32, seed=seed
        )
        tables = plan.kept[0] if plan else contexts.tables
        plan = plan or plan_decode(
            contexts.tables, contexts.lengths, key_cache=contexts.key_cache, num_heads=2
        )
        order = contexts.tables.clone()
        wide = random_query(2, 4, 32, F32)
        query, out = wide[:, ::2], torch.full((2, 2, 32), torch.nan)
        keys, values = torch.full_like(contexts.key_cache, torch.nan), contexts.value_cache.clone()
        # The plan's table names other blocks than this pool's own: move them there.
        used = [slice(0, 38), slice(0, 1)]
        for row, blocks in enumerate(used):
            keys[tables[row, blocks].long()] = contexts.key_cache[order[row, blocks].long()]
            values[tables[row, blocks].long()] = contexts.value_cache[order[row, blocks].long()]
        plan.run(query, keys, values, out, scale=SCALE)
        for row in range(2):
            expected = contexts.attend(row, query[row : row + 1], scale=SCALE)[0]
            torch.testing.assert_close(out[row].double(), expected, **TOLERANCES[F32])


def test_large_scores_do_not_overflow() -> None:
    """Softmax is online: scores whose exponentials no float holds."""
    contexts = PagedContexts([300], num_kv_heads=1, head_dim=16, block_size=16, dtype=F32)
    query = random_query(1, 1, 16, F32)
    got = decode(contexts, query, scale=100.0)
    expected = contexts.attend(0, query, scale=100.0)
    torch.testing.assert_close(got.double(), expected, atol=2e-4, rtol=2e-4)


def test_empty_batches() -> None:
    """No sequences, and no chunks, make no rows."""
    contexts = PagedContexts([], num_kv_heads=1, head_dim=16, block_size=8, dtype=F32)
    query = torch.empty(0, 2, 16)
    assert decode(contexts, query, scale=1.0).shape == (0, 2, 16)
    assert prefill(contexts, query, [], scale=1.0).shape == (0, 2, 16)


@pytest.mark.parametrize("dtype", [BF16, F32, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 37, 600])
def test_writes_go_to_their_slots_only(dtype: torch.dtype, num_tokens: int) -> None:
    """From strided sources, any order of slots, -1 skipped, every other slot untouched."""
    num_blocks, block_size, num_kv_heads, head_dim = 50, 16, 3, 24
    pool = torch.zeros(num_blocks, 2, block_size, num_kv_heads, head_dim, dtype=dtype)
    before = torch.randn(pool.shape).to(dtype)
    pool.copy_(before)
    source = torch.randn(2, num_kv_heads, num_tokens, 2 * head_dim).to(dtype)
    key, value = (each.transpose(0, 1)[..., :head_dim] for each in source)
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[::5] = -1
    reshape_and_cache(key, value, pool[:, 0], pool[:, 1], slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            before[slot // block_size, 0, slot % block_size] = key[token]
            before[slot // block_size, 1, slot % block_size] = value[token]
    assert torch.equal(pool, before)


def test_wrong_arguments_are_named() -> None:
    """A ValueError says which argument does not fit."""
    contexts = PagedContexts([20, 5], num_kv_heads=2, head_dim=16, block_size=8, dtype=F32)
    query = torch.zeros(2, 4, 16)
    good = {
        "query": query,
        "key_cache": contexts.key_cache,
        "value_cache": contexts.value_cache,
        "block_tables": contexts.tables,
        "context_lens": contexts.lengths,
        "scale": 1.0,
    }
    wrong = {
        "query": [query[:1], query.to(BF16), torch.zeros(2, 4, 32)[..., ::2]],
        "key_cache": [contexts.key_cache.double(), contexts.key_cache[..., :0]],
        "value_cache": [contexts.value_cache[:1], contexts.value_cache.to(BF16)],
        "block_tables": [contexts.tables[0], contexts.tables.long(), contexts.tables[:, ::2]],
        "context_lens": [torch.tensor([20]), torch.tensor([-1, 5]), torch.tensor([999, 5])],
        "sliding_window": [0],
        "softcap": [0.0],
        "out": [torch.zeros(2, 4, 8), torch.zeros(2, 4, 16, dtype=BF16)],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                paged_attention(**{**good, name: value})
    with pytest.raises(ValueError, match="num_heads 3"):
        paged_attention(**{**good, "query": query[:, :3]})
    with pytest.raises(ValueError, match="query_starts"):
        prefill(contexts, torch.zeros(40, 4, 16), [30, 10], scale=1.0)
    with pytest.raises(ValueError, match="slot_mapping"):
        reshape_and_cache(
            query[:, :2], query[:, :2], contexts.key_cache, contexts.value_cache,
            torch.zeros(2, dtype=torch.int32),
        )  # fmt: skip


def test_what_is_not_supported_is_said() -> None:
    """fp16 and odd head sizes are refused before anything runs."""
    assert why_unsupported(64, BF16) is None
    assert "float16" in str(why_unsupported(64, torch.float16))
    assert "head_dim 72" in str(why_unsupported(72, F32))
    assert "head_dim 512" in str(why_unsupported(512, F32))
