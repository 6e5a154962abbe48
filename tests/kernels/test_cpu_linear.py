"""The compiled matrix product against float64."""

from __future__ import annotations

import pytest
import torch
from octavo_kernels.cpu.linear import PackedLinear, packed_size

# Tiles of 6 or 12 rows by 16 or 32 outputs: below, at, between and above their borders.
ROWS = [0, 1, 5, 6, 7, 12, 13, 64, 97]
SHAPES = [(576, 960), (64, 49), (1, 16), (33, 1), (7, 32), (1536, 576)]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_product(num_in: int, num_out: int, num_rows: int, num_threads: int) -> None:
    """Rows that lie apart, with a bias and without; nothing else is written."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(num_rows)
    weight, bias = torch.randn(num_out, num_in), torch.randn(num_out)
    x = torch.randn(num_rows, num_in + 3)[:, :num_in]
    room = torch.full((packed_size(num_out, num_in) + 16,), float("nan"))
    exact = x.double() @ weight.double().T
    # An input's rounding, times the largest sum of magnitudes that an output has.
    tolerance = 2.0**-24 * num_in * float((x.abs() @ weight.abs().T).max()) if num_rows else 0.0
    wide = torch.full((num_out, num_in + 5), float("nan"))
    wide[:, :num_in] = weight
    plain = PackedLinear(wide[:, :num_in], None, room[:-16])
    torch.testing.assert_close(plain(x).double(), exact, rtol=0, atol=tolerance)
    assert room[-16:].isnan().all()
    biased = PackedLinear(weight, bias)
    torch.testing.assert_close(biased(x).double(), exact + bias, rtol=0, atol=tolerance + 1e-6)


def test_a_row_is_the_same_whatever_stands_beside_it() -> None:
    """To the bit: alone, and at every place of every number of rows."""
    torch.manual_seed(0)
    product = PackedLinear(torch.randn(200, 576), torch.randn(200))
    x = torch.randn(70, 576)
    together = product(x)
    for num_rows in range(1, 70):
        first = 70 - num_rows
        assert torch.equal(product(x[first:]), together[first:])


def test_nan_and_infinity_stay_in_their_row() -> None:
    """A row that is broken breaks no other one."""
    torch.manual_seed(0)
    product = PackedLinear(torch.randn(40, 64), None)
    x = torch.randn(9, 64)
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
        ((torch.zeros(4, 4, dtype=torch.bfloat16), None), "weight"),
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
        torch.zeros(2, 8)[:, ::2],
    ],
)
def test_rows_that_do_not_fit(x: torch.Tensor) -> None:
    """Nothing is read past a row's end."""
    with pytest.raises(ValueError, match="x"):
        PackedLinear(torch.zeros(4, 4), None)(x)
