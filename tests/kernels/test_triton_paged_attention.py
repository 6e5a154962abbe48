"""Decode against attention in float64, over a pool where every slot not to be read is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from octavo_kernels.triton_ops.paged_attention import paged_attention
from octavo_kernels.triton_ops.splits import Scratch
from octavo_kernels.triton_ops.tuning import Tuning
from torch import Tensor

from tests.kernels.support import NO_BLOCK, TOLERANCES, PagedContexts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

SCALE = 0.3
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

# Each value of each column meets most values of the others in some row; all of them is
# too much for the interpreter. Group, head_dim, block_size, dtype, window, soft-cap,
# splits, tokens of a tile.
CASES = [
    (1, 64, 16, F16, None, None, 1, 64),
    (2, 128, 8, BF16, None, None, 2, 16),
    (3, 64, 16, BF16, 33, None, 3, 32),
    (4, 128, 32, F16, 20, None, 1, 64),
    (5, 80, 8, F32, None, 5.0, 4, 32),
    (7, 128, 16, BF16, None, None, 1, 32),
    (8, 96, 64, F16, None, None, 2, 64),
    (9, 80, 32, BF16, 100, 30.0, 1, 32),
    (2, 256, 16, F16, 50, 50.0, 2, 16),
    (1, 256, 128, F32, None, None, 1, 32),
    (3, 96, 8, F16, 7, 2.0, 5, 16),
    (4, 64, 128, BF16, 130, None, 2, 16),
    (5, 128, 64, F16, 64, 50.0, 3, 128),
    (7, 64, 32, F32, 1, None, 2, 32),
    (8, 80, 16, F16, None, 10.0, 8, 16),
    (9, 256, 8, BF16, 16, None, 1, 16),
    (1, 96, 32, BF16, 31, None, 4, 64),
    (17, 16, 16, F32, None, None, 3, 16),
    (3, 40, 16, F32, 48, None, 1, 16),
    # Of a block longer than a tile, a window begins within the first tile or a later one.
    (2, 64, 128, F32, 20, None, 2, 16),
]


def attend(contexts: PagedContexts, query: Tensor, device: str, **options: Any) -> Tensor:
    """Run the kernel on a device, into an output full of NaN."""
    pool, query = contexts.pool.to(device), query.to(device)
    out = torch.full_like(query, torch.nan)
    got = paged_attention(
        query,
        pool[:, 0],
        pool[:, 1],
        contexts.tables.to(device),
        contexts.lengths.to(device),
        out=out,
        **options,
    )
    assert got is out
    return got.cpu().double()


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "dtype", "window", "softcap", "num_splits", "tile"), CASES
)
def test_equals_attention_in_float64(
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    num_splits: int,
    tile: int,
    device: str,
) -> None:
    """One token, a padding row, a whole block and one more token, and several tiles and a bit."""
    lengths = [1, 0, block_size, block_size + 1, 70]
    num_kv_heads = 2 if group < 4 else 1
    contexts = PagedContexts(
        lengths, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    query = torch.randn(len(lengths), num_kv_heads * group, head_dim).to(dtype)
    options: dict[str, Any] = {
        "scale": head_dim**-0.5,
        "sliding_window": window,
        "softcap": softcap,
    }
    expected = [contexts.attend(i, query[i : i + 1], **options) for i in range(len(lengths))]
    if window is not None:
        for index, length in enumerate(lengths):
            contexts.poison_before(index, length - window)
    got = attend(
        contexts, query, device, **options, num_splits=num_splits, tuning=Tuning(tile, 4, 3)
    )
    torch.testing.assert_close(got, torch.cat(expected), **TOLERANCES[dtype])
    assert torch.equal(got[1], torch.zeros_like(got[1]))


def small(lengths: list[int], **options: Any) -> tuple[PagedContexts, Tensor, Tensor]:
    """Contexts of one small shape, a query of four heads, and what is to come out."""
    shape = {"num_kv_heads": 2, "head_dim": 16, "block_size": 8, "dtype": F32}
    contexts = PagedContexts(lengths, **shape, **options)
    query = torch.randn(len(lengths), 4, 16)
    expected = [
        contexts.attend(i, query[i : i + 1], scale=SCALE).float() for i in range(len(lengths))
    ]
    return contexts, query, torch.cat([torch.empty(0, 4, 16), *expected])


def test_chooses_all_that_is_left_out(device: str) -> None:
    """Without output, splits, bound and layout, the launcher finds them itself."""
    contexts, query, expected = small([9, 300])
    pool = contexts.pool.to(device)
    got = paged_attention(
        query.to(device),
        pool[:, 0],
        pool[:, 1],
        contexts.tables.to(device),
        contexts.lengths.to(device),
        scale=SCALE,
    )
    torch.testing.assert_close(got.cpu(), expected, **TOLERANCES[F32])


def test_sequences_may_share_blocks(device: str) -> None:
    """Contexts that begin with the same blocks read them each."""
    contexts, query, expected = small([40, 33, 16], shared_blocks=3)
    assert contexts.tables[0, :2].equal(contexts.tables[2, :2])
    got = attend(contexts, query, device, scale=SCALE, num_splits=2, tuning=Tuning(16, 4, 3))
    torch.testing.assert_close(got.float(), expected, **TOLERANCES[F32])


def test_an_empty_batch_launches_nothing(device: str) -> None:
    """A step without decodes is no error."""
    contexts, query, _ = small([])
    assert attend(contexts, query, device, scale=SCALE).shape == (0, 4, 16)


def test_rows_may_lie_apart(device: str) -> None:
    """Query, output and tables may be parts of wider tensors."""
    contexts, query, expected = small([21, 5])
    wide = torch.full((2, 12, 16), torch.nan)
    wide[:, 4:8] = query
    tables = torch.full((2, 11), NO_BLOCK, dtype=torch.int32)
    tables[:, : contexts.tables.shape[1]] = contexts.tables
    out, pool = torch.zeros(2, 9, 16, device=device), contexts.pool.to(device)
    paged_attention(
        wide.to(device)[:, 4:8],
        pool[:, 0],
        pool[:, 1],
        tables.to(device)[:, : contexts.tables.shape[1]],
        contexts.lengths.to(device),
        scale=SCALE,
        num_splits=2,
        out=out[:, 3:7],
    )
    torch.testing.assert_close(out[:, 3:7].cpu(), expected, **TOLERANCES[F32])
    assert not out[:, :3].any()
    assert not out[:, 7:].any()


def test_contiguous_blocks_need_no_table(device: str) -> None:
    """The variant that measures paging reads the first entry and counts on from it."""
    contexts, query, _ = small([37])
    contexts.pool = contexts.pool[contexts.tables[0, :5].tolist()]
    contexts.tables[0] = torch.arange(6)
    expected = contexts.attend(0, query, scale=SCALE)
    contexts.tables[0, 1:] = NO_BLOCK
    for num_splits in (1, 2):
        got = attend(
            contexts,
            query,
            device,
            scale=SCALE,
            contiguous=True,
            num_splits=num_splits,
            tuning=Tuning(16, 4, 3),
        )
        torch.testing.assert_close(got, expected, **TOLERANCES[F32])


def test_places_pass_two_to_the_thirty_one(device: str) -> None:
    """A block 2^31 elements into the pool is read, not one that many short of it."""
    contexts, query, _ = small([7])
    apart = 2**29 + 8
    memory = torch.empty(4 * apart + 2**12, dtype=F16, device=device)  # four pages of it used
    pool = memory.as_strided((5, 2, 8, 2, 16), (apart, 256, 32, 16, 1))
    contexts.pool = torch.randn(1, 2, 8, 2, 16).to(F16)
    contexts.tables[0] = 0
    pool[4] = contexts.pool[0]
    got = paged_attention(
        query.half().to(device),
        pool[:, 0],
        pool[:, 1],
        torch.tensor([[4]], dtype=torch.int32, device=device),
        contexts.lengths.to(device),
        scale=SCALE,
    )
    expected = contexts.attend(0, query.half(), scale=SCALE)
    torch.testing.assert_close(got.cpu().double(), expected, **TOLERANCES[F16])


def test_scratch_serves_step_after_step(device: str) -> None:
    """Once reserved, memory stays where it is; growing leaves what was handed out alone."""
    scratch = Scratch(torch.device(device))
    scratch.reserve(4, 8, 16, 32)
    results, weights = scratch.take(4, 8, 16, 32)
    assert (results.shape, weights.shape) == ((4, 8, 16, 32), (4, 8, 16))
    again, _ = scratch.take(2, 8, 16, 32)
    assert again.data_ptr() == results.data_ptr()
    results.fill_(1)
    weights.fill_(2)
    assert (results == 1).all()
    scratch.take(8, 8, 16, 32)[0].fill_(3)
    assert (results == 1).all()
    contexts, query, expected = small([50])
    for _ in range(2):
        got = attend(contexts, query, device, scale=SCALE, num_splits=3, scratch=scratch)
        torch.testing.assert_close(got.float(), expected, **TOLERANCES[F32])


def refused(**changes: Any) -> dict[str, Any]:
    """Arguments of a call that would be right, but for `changes`."""
    return {
        "query": torch.zeros(2, 4, 16),
        "key_cache": torch.zeros(3, 8, 2, 16),
        "value_cache": torch.zeros(3, 8, 2, 16),
        "block_tables": torch.zeros(2, 1, dtype=torch.int32),
        "context_lens": torch.ones(2, dtype=torch.int32),
        "scale": 1.0,
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 64)}, "query .* not of shape"),
        ({"query": torch.zeros(2, 4, 8)}, "query .* not of shape"),
        ({"query": torch.zeros(2, 3, 16)}, "query has 3 heads"),
        ({"query": torch.zeros(3, 4, 16)}, "block_tables .* not of shape"),
        ({"query": torch.zeros(2, 4, 16).half()}, "query is torch.float16"),
        ({"query": torch.zeros(2, 16, 4).mT}, "query .* not contiguous"),
        ({"query": torch.zeros(2, 4, 16, device="meta")}, "query is on meta"),
        ({"key_cache": torch.zeros(3, 12, 2, 16)}, "key_cache has blocks of 12 tokens"),
        ({"key_cache": torch.zeros(3, 8, 2, 20)}, "key_cache has a head_dim of 20"),
        ({"key_cache": torch.zeros(3, 8, 2, 16).double()}, "key_cache is torch.float64"),
        ({"key_cache": torch.zeros(3, 2, 8, 16).transpose(1, 2)}, "key_cache .* not contiguous"),
        ({"key_cache": torch.zeros(769)[1:].view(3, 8, 2, 16)}, "key_cache .* not aligned"),
        ({"key_cache": torch.zeros(6, 8, 2, 16)[::2]}, "value_cache has a block stride"),
        ({"value_cache": torch.zeros(4, 8, 2, 16)}, "value_cache .* not of shape"),
        ({"value_cache": torch.zeros(3, 8, 2, 16).half()}, "value_cache is torch.float16"),
        ({"block_tables": torch.zeros(2, 1, dtype=torch.int64)}, "block_tables is torch.int64"),
        ({"block_tables": torch.zeros(2, dtype=torch.int32)}, "block_tables .* not of shape"),
        ({"context_lens": torch.ones(3, dtype=torch.int32)}, "context_lens .* not of shape"),
        ({"context_lens": torch.ones(2, dtype=torch.int64)}, "context_lens is torch.int64"),
        ({"out": torch.zeros(2, 4, 8)}, "out .* not of shape"),
        ({"out": torch.zeros(2, 4, 16).bfloat16()}, "out is torch.bfloat16"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"softcap": 0.0}, "softcap is 0"),
        ({"num_splits": 65}, "num_splits is 65"),
        ({"max_context_len": 0}, "max_context_len is 0"),
    ],
)
def test_says_which_argument_is_wrong(changes: dict[str, Any], message: str) -> None:
    """A wrong argument is an error that names it, not a read past it."""
    with pytest.raises(ValueError, match=message):
        paged_attention(**refused(**changes))
