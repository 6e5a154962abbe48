"""The largest element of each row, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from octavo_kernels.cpu.largest import largest

DTYPES = [torch.float32, torch.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def check(x: torch.Tensor) -> None:
    best, places = largest(x)
    wanted = np.argmax(x.float().numpy(), axis=1)
    assert places.tolist() == wanted.tolist()
    torch.testing.assert_close(
        best, x[torch.arange(len(x)), places], equal_nan=True, rtol=0, atol=0
    )


@each_dtype
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("width", [1, 31, 255, 256, 257, 512, 513, 1100, 49152])
def test_random_rows(width: int, num_threads: int, dtype: torch.dtype) -> None:
    """In bf16 many elements are equal; rows lie apart."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(width)
    check(torch.randn(17, width + 3).to(dtype)[:, :width])
    check(-torch.rand(3, width).to(dtype))
    check(torch.randn(0, width).to(dtype))


@each_dtype
@pytest.mark.parametrize("width", [1, 40, 512, 1100])
def test_each_place(width: int, dtype: torch.dtype) -> None:
    """Wherever it stands: alone, before an equal one, infinite, not a number."""
    for value in (1.0, float("inf"), float("nan")):
        x = torch.full((width, width), -2.0, dtype=dtype)
        x.fill_diagonal_(value)
        check(x)
        x[:, -1] = value
        check(x)


@each_dtype
def test_nan_is_the_largest(dtype: torch.dtype) -> None:
    """Also after infinity, at the end and at the front; a row of -inf has its first one."""
    for width in (7, 512, 700):
        x = torch.randn(4, width).to(dtype)
        x[0, 3], x[0, 5] = float("inf"), float("nan")
        x[1, 0], x[1, -1] = float("nan"), float("inf")
        x[2, -1] = float("nan")
        x[3] = -float("inf")
        check(x)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(4), torch.zeros(2, 0), torch.zeros(2, 8)[:, ::2], torch.zeros(2, 2).double()],
)
def test_what_does_not_fit(x: torch.Tensor) -> None:
    """Nothing is read past a row's end."""
    with pytest.raises(ValueError, match="x"):
        largest(x)
