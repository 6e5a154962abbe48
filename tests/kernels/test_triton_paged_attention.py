"""Decode against attention in float64, over a pool where every slot not to be read is NaN."""

from __future__ import annotations

import pytest
import torch
from octavo_kernels.triton_ops.paged_attention import (
    MAX_SPLITS,
    Scratch,
    choose_num_splits,
    paged_attention,
)
from octavo_kernels.triton_ops.tuning import Tuning
from torch import Tensor

from tests.kernels.support import TOLERANCES, PagedContexts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

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
    (1, 256, 128, F32, None, None, 1, 128),
    (3, 96, 8, F16, 7, 2.0, 5, 8),
    (4, 64, 128, BF16, 130, None, 2, 16),
    (5, 128, 64, F16, 64, 50.0, 3, 128),
    (7, 64, 32, F32, 1, None, 2, 32),
    (8, 80, 16, F16, None, 10.0, 8, 16),
    (9, 256, 8, BF16, 16, None, 1, 16),
    (1, 96, 32, BF16, 31, None, 4, 64),
    (17, 16, 16, F32, None, None, 3, 16),
    (3, 40, 16, F32, 48, None, 1, 16),
]


def attend(contexts: PagedContexts, query: Tensor, **options: object) -> Tensor:
    """Run the kernel into an output full of NaN."""
    out = torch.full_like(query, torch.nan)
    got = paged_attention(
        query,
        contexts.key_cache,
        contexts.value_cache,
        contexts.tables,
        contexts.lengths,
        out=out,
        **options,  # type: ignore[arg-type]
    )
    assert got is out
    return got


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
) -> None:
    """One token, a padding row, a whole block and one more token, and several tiles and a bit."""
    lengths = [1, 0, block_size, block_size + 1, 70]
    num_kv_heads = 2 if group < 4 else 1
    contexts = PagedContexts(
        lengths, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    query = torch.randn(len(lengths), num_kv_heads * group, head_dim).to(dtype)
    options = {"scale": head_dim**-0.5, "sliding_window": window, "softcap": softcap}
    expected = [
        contexts.attend(index, query[index : index + 1], **options)  # type: ignore[arg-type]
        for index in range(len(lengths))
    ]
    for index, length in enumerate(lengths):
        if window is not None:
            contexts.poison_before(index, length - window)
    got = attend(
        contexts, query, **options, num_splits=num_splits, tuning=Tuning(tile, 4, 3)
    ).double()
    torch.testing.assert_close(got, torch.cat(expected), **TOLERANCES[dtype])
    assert torch.equal(got[1], torch.zeros_like(got[1]))
