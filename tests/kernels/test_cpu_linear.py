"""The compiled matrix product against float64."""

from __future__ import annotations

from ctypes import byref

import pytest
import torch
from octavo_kernels.cpu.layers import silu_mul
from octavo_kernels.cpu.library import library
from octavo_kernels.cpu.linear import PackedLinear, packed_size

# Tiles of 6 or 12 rows by 16 or 32 outputs: below, at, between and above their borders.
ROWS = [0, 1, 5, 6, 7, 12, 13, 64, 97]
SHAPES = [(576, 960), (64, 49), (1, 16), (2, 33), (33, 1), (6, 32), (7, 32), (1536, 576)]
DTYPES = [torch.float32, torch.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_dtype
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_product(
    num_in: int, num_out: int, num_rows: int, num_threads: int, dtype: torch.dtype
) -> None:
    """Rows that lie apart, with a bias and without; nothing else is written."""
    if dtype is torch.bfloat16:
        num_in += num_in % 2
    torch.set_num_threads(num_threads)
    torch.manual_seed(num_rows)
    weight, bias = torch.randn(num_out, num_in).to(dtype), torch.randn(num_out).to(dtype)
    x = torch.randn(num_rows, num_in + 3).to(dtype)[:, :num_in]
    room = torch.full((packed_size(num_out, num_in) + 16,), float("nan"), dtype=dtype)
    exact = x.double() @ weight.double().T
    # An input's rounding, times the largest sum of magnitudes that an output has.
    magnitudes = x.double().abs() @ weight.double().abs().T
    tolerance = 2.0**-24 * num_in * float(magnitudes.max()) if num_rows else 0.0
    rounding = 0 if dtype is torch.float32 else 2.0**-8
    wide = torch.full((num_out, num_in + 5), float("nan"), dtype=dtype)
    wide[:, :num_in] = weight
    plain = PackedLinear(wide[:, :num_in], None, room[:-16])
    torch.testing.assert_close(plain(x).double(), exact, rtol=rounding, atol=tolerance)
    assert room[-16:].isnan().all()
    biased = PackedLinear(weight, bias)
    torch.testing.assert_close(
        biased(x).double(), exact + bias, rtol=rounding, atol=tolerance + 1e-6
    )


@each_dtype
def test_a_row_is_the_same_whatever_stands_beside_it(dtype: torch.dtype) -> None:
    """To the bit: alone, and at every place of every number of rows."""
    torch.manual_seed(0)
    product = PackedLinear(torch.randn(200, 576).to(dtype), torch.randn(200).to(dtype))
    x = torch.randn(70, 576).to(dtype)
    together = product(x)
    for num_rows in range(1, 70):
        first = 70 - num_rows
        assert torch.equal(product(x[first:]), together[first:])


@each_dtype
@pytest.mark.parametrize("num_rows", ROWS[1:])
def test_a_gate_within_its_product(num_rows: int, dtype: torch.dtype) -> None:
    """To the bit as the product and then the gate; nothing else is written."""
    torch.manual_seed(num_rows)
    product = PackedLinear(torch.randn(192, 64).to(dtype), torch.randn(192).to(dtype))
    x = torch.randn(num_rows, 64).to(dtype)
    apart = silu_mul(product(x))
    out = torch.full((num_rows + 1, 96), float("nan"), dtype=dtype)
    call = product.arguments
    call.x, call.out, call.num_rows, call.is_gated = x.data_ptr(), out.data_ptr(), num_rows, 1
    library().octavo_multiply(byref(call))
    assert torch.equal(out[:-1], apart)
    assert out[-1].isnan().all()


@each_dtype
def test_rows_of_the_weight_come_back(dtype: torch.dtype) -> None:
    """As they were before they were packed."""
    weight = torch.randn(49, 64).to(dtype)
    packed = PackedLinear(weight, None)
    assert torch.equal(packed.rows(torch.arange(49)), weight)
    assert packed.rows(torch.arange(0)).shape == (0, 64)
    for wrong in (-1, 49):
        with pytest.raises(ValueError, match="indices"):
            packed.rows(torch.tensor([3, wrong]))


@each_dtype
def test_nan_and_infinity_stay_in_their_row(dtype: torch.dtype) -> None:
    """A row that is broken breaks no other one."""
    torch.manual_seed(0)
    product = PackedLinear(torch.randn(40, 64).to(dtype), None)
    x = torch.randn(9, 64).to(dtype)
    sound = product(x)
    x[4, 5], x[6, 0] = float("nan"), float("inf")
    broken = product(x)
    assert broken[4].isnan().all()
    assert not broken[6].isfinite().any()
    rest = [0, 1, 2, 3, 5, 7, 8]
    assert torch.equal(broken[rest], sound[rest])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((torch.zeros(4), None), "weight"),
        ((torch.zeros(4, 4, dtype=torch.float16), None), "weight"),
        ((torch.zeros(4, 3, dtype=torch.bfloat16), None), "weight"),
        ((torch.zeros(4, 4, dtype=torch.bfloat16), torch.zeros(4)), "bias"),
        ((torch.zeros(4, 4, dtype=torch.bfloat16), None, torch.zeros(128)), "room"),
        ((torch.zeros(4, 4).T[::2], None), "weight"),
        ((torch.zeros(4, 0), None), "weight"),
        ((torch.zeros(4, 4), torch.zeros(3)), "bias"),
        ((torch.zeros(4, 4), torch.zeros(4).double()), "bias"),
        ((torch.zeros(4, 4), None, torch.zeros(4)), "room"),
        ((torch.zeros(4, 4), None, torch.zeros(packed_size(4, 4), 2)[:, 0]), "room"),
    ],
)
def test_weights_that_do_not_fit(arguments: tuple[torch.Tensor, ...], named: str) -> None:
    """The message names the argument."""
    with pytest.raises(ValueError, match=named):
        PackedLinear(*arguments)


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 5),
        torch.zeros(4),
        torch.zeros(2, 4, dtype=torch.float64),
        torch.zeros(2, 4, dtype=torch.bfloat16),
        torch.zeros(2, 8)[:, ::2],
    ],
)
def test_rows_that_do_not_fit(x: torch.Tensor) -> None:
    """Nothing is read past a row's end."""
    with pytest.raises(ValueError, match="x"):
        PackedLinear(torch.zeros(4, 4), None)(x)
