"""The compiled row operators against float64."""

from __future__ import annotations

import pytest
import torch
from octavo_kernels.cpu.layers import (
    NormPlan,
    RotatePlan,
    SiluMulPlan,
    rms_norm,
    rotate_,
    silu_mul,
)
from torch import Tensor

# One rounding of the result, and of what was written in between.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
DTYPES = [torch.float32, torch.bfloat16]
ROWS = [0, 1, 3, 200]


def assert_near(got: Tensor, exact: Tensor) -> None:
    """Relative to each value, and to the largest one for those near zero."""
    tolerance = TOLERANCE[got.dtype]
    largest = exact.abs().max().item() if exact.numel() else 0.0
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance * largest / 8)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(dtype: torch.dtype, num_rows: int, num_threads: int) -> None:
    """Alone and with something added first, on rows that lie apart."""
    torch.set_num_threads(num_threads)
    torch.manual_seed(num_rows)
    wide = torch.randn(num_rows, 800, dtype=dtype)
    x, delta = wide[:, :576], torch.randn(num_rows, 576, dtype=dtype)
    weight = torch.randn(576, dtype=dtype)
    assert_near(rms_norm(x, weight, 1e-5), exact_norm(x, weight))
    total = (x + delta).clone()
    untouched = wide[:, 576:].clone()
    assert_near(rms_norm(x, weight, 1e-5, delta=delta), exact_norm(total, weight))
    assert torch.equal(x, total), "the sum stays in x"
    assert torch.equal(wide[:, 576:], untouched)


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype: torch.dtype, num_rows: int) -> None:
    """Also far out, where the exponential vanishes."""
    torch.manual_seed(num_rows)
    gate_up = torch.randn(num_rows, 2 * 96, dtype=dtype) * 4
    gate_up[:1, :4] = torch.tensor([300.0, -300.0, 0.0, -80.0])
    exact = gate_up.double()
    expected = torch.nn.functional.silu(exact[:, :96]) * exact[:, 96:]
    assert_near(silu_mul(gate_up), expected)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate(dtype: torch.dtype, head_dim: int, num_rows: int) -> None:
    """The heads in front are rotated, those behind them stay."""
    torch.manual_seed(num_rows)
    half, num_heads = head_dim // 2, 5
    x = torch.randn(num_rows, 7 * head_dim, dtype=dtype)
    angles = torch.rand(num_rows, half) * 100
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)
    heads = x.double().view(num_rows, 7, head_dim)
    a, b = heads[:, :num_heads, :half], heads[:, :num_heads, half:]
    cosine, sine = table.double()[:, None].split(half, dim=-1)
    expected = torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)
    rotate_(x, table, num_heads)
    got = x.view(num_rows, 7, head_dim)
    assert_near(got[:, :num_heads], expected)
    assert torch.equal(got[:, num_heads:].double(), heads[:, num_heads:])


def test_a_plan_keeps_nothing_of_the_run_before() -> None:
    """One plan serves layer after layer, with other weights and with or without a sum."""
    torch.manual_seed(1)
    x = torch.randn(5, 64)
    norm, silu_mul_plan = NormPlan(x), SiluMulPlan(5, 128, torch.float32)
    rotate = RotatePlan(torch.randn(5, 64), 2)
    for _ in range(2):
        weight, delta = torch.randn(64), torch.randn(5, 64)
        expected = rms_norm(x.clone(), weight, 1e-5, delta=delta)
        assert torch.equal(norm.run(weight, 1e-5, delta), expected)
        assert torch.equal(norm.run(weight, 1e-3), rms_norm(x, weight, 1e-3))
        gate_up = torch.randn(5, 200)[:, :128]
        assert torch.equal(silu_mul_plan.run(gate_up), silu_mul(gate_up))
        wide = torch.randn(5, 300)
        turned = wide.clone()
        rotate_(turned, rotate._table, 2)
        rotate.run(wide)
        assert torch.equal(wide, turned)


def test_what_is_not_as_planned_is_named() -> None:
    """In a later run as in the first one."""
    x = torch.ones(4, 64)
    cases = {
        "weight": lambda: NormPlan(x).run(torch.ones(32), 1e-5),
        "delta": lambda: NormPlan(x).run(torch.ones(64), 1e-5, torch.ones(3, 64)),
        "gate_up": lambda: SiluMulPlan(4, 128, torch.float32).run(torch.ones(4, 64)),
        "table": lambda: RotatePlan(x, 1).run(torch.ones(3, 64)),
    }
    for name, run in cases.items():
        with pytest.raises(ValueError, match=name):
            run()


def test_what_does_not_fit_is_named() -> None:
    """Instead of read past its end."""
    ones = torch.ones(4, 64)
    for call, message in (
        (lambda: rms_norm(ones, torch.ones(32), 1e-5), "weight"),
        (lambda: rms_norm(ones, torch.ones(64), 1e-5, delta=torch.ones(3, 64)), "delta"),
        (lambda: rms_norm(ones, torch.ones(64, dtype=torch.bfloat16), 1e-5), "weight"),
        (lambda: rms_norm(torch.ones(4, 48), torch.ones(48), 1e-5), "48 wide"),
        (lambda: rms_norm(ones.half(), torch.ones(64).half(), 1e-5), "float16"),
        (lambda: rms_norm(torch.ones(64, 4).t(), torch.ones(64), 1e-5), "x: rows"),
        (lambda: silu_mul(torch.ones(4, 96)), "48 wide"),
        (lambda: rotate_(ones, torch.ones(4, 64), 2), "room for 2 heads"),
        (lambda: rotate_(ones, torch.ones(3, 64), 1), "table"),
        (lambda: rotate_(torch.ones(4, 96), torch.ones(4, 96), 1), "96 wide"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_rows_of_odd_shapes_are_named() -> None:
    """Where a part would be left out without a word."""
    for call, message in (
        (lambda: silu_mul(torch.ones(4, 65)), "two halves"),
        (lambda: rms_norm(torch.ones(2, 2, 64), torch.ones(64), 1e-5), "x "),
        (lambda: rotate_(torch.ones(4, 64), torch.ones(4, 64), -1), "room for -1 heads"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
