"""What stands between a decoder layer's matrix products, compiled: one pass over each row.

Torch needs six operators for a norm and ten for a rotation, each with its own trip through
memory and its own start of the threads. Sums are in fp32; a row is the same to the bit
whatever rows stand beside it.
"""

from __future__ import annotations

import functools
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from octavo_kernels.checks import check_dtype, check_shape
from octavo_kernels.cpu.library import library

_DTYPES = (torch.float32, torch.bfloat16)
_LEAST_PARALLEL_ELEMENTS = 1 << 14

WIDTH_MULTIPLE = 32
"""Widths that the kernels take are multiples of this, whatever the CPU."""


class _Rows(Structure):
    """`octavo_rows` of csrc/layers.c."""

    _fields_ = (
        *[(name, c_void_p) for name in ("x", "y", "weight", "out")],
        *[(name, c_int64) for name in ("x_stride", "y_stride", "out_stride")],
        *[(name, c_int64) for name in ("num_rows", "width", "num_heads")],
        ("epsilon", c_float),
        *[(name, c_int32) for name in ("is_bf16", "num_threads")],
    )


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, delta: Tensor | None = None) -> Tensor:
    """Divide each row by its root mean square, and scale it.

    Args:
        x: [num_rows, width] fp32 or bf16, rows contiguous; with `delta` it is changed.
        weight: [width], in x's dtype.
        epsilon: added to the mean square.
        delta: as x; added to x first, in place.
    Returns: as x.

    Raises:
        ValueError: if shapes or dtypes disagree, or width is no multiple of 32.
        KernelsUnavailable: if the compiled kernels cannot be had here.
    Source: Root Mean Square Layer Normalization (Zhang and Sennrich, 2019).
    """
    check_shape("x", x, (None, None))
    num_rows, width = x.shape
    check_shape("weight", weight, (width,))
    out = torch.empty((num_rows, width), dtype=x.dtype)
    rows = _Rows(x=x.data_ptr(), weight=weight.data_ptr(), out=out.data_ptr(), epsilon=epsilon)
    rows.x_stride, rows.out_stride, rows.num_rows, rows.width = x.stride(0), width, num_rows, width
    if delta is not None:
        check_shape("delta", delta, x.shape)
        rows.y, rows.y_stride = delta.data_ptr(), delta.stride(0)
    _run(_functions().rms_norm, rows, x=x, weight=weight, delta=delta)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """The gated half of an MLP: silu(gate) * up.

    Args:
        gate_up: [num_rows, 2 * width] fp32 or bf16, rows contiguous: gates, then ups.
    Returns: [num_rows, width].

    Raises:
        ValueError: if width is no multiple of 32, or the dtype another.
        KernelsUnavailable: if the compiled kernels cannot be had here.
    Source: GLU Variants Improve Transformer (Shazeer, 2020).
    """
    num_rows, twice = gate_up.shape
    width = twice // 2
    if twice % 2:
        raise ValueError(f"gate_up {tuple(gate_up.shape)} has no two halves")
    out = torch.empty((num_rows, width), dtype=gate_up.dtype)
    gates = gate_up.data_ptr()
    rows = _Rows(x=gates, y=gates + width * gate_up.element_size(), out=out.data_ptr())
    rows.x_stride = rows.y_stride = gate_up.stride(0)
    rows.out_stride, rows.num_rows, rows.width = width, num_rows, width
    _run(_functions().silu_mul, rows, gate_up=gate_up)
    return out


def rotate_(x: Tensor, table: Tensor, num_heads: int) -> None:
    """Rotate each head by its token's position, in place.

    Args:
        x: [num_tokens, at least num_heads * head_dim] fp32 or bf16, rows contiguous; what
            follows the heads stays as it is.
        table: [num_tokens, head_dim] in x's dtype: cosines, then sines.
        num_heads: heads at the front of each row.

    Raises:
        ValueError: if shapes or dtypes disagree, or head_dim is no multiple of 64.
        KernelsUnavailable: if the compiled kernels cannot be had here.
    Source: RoFormer (Su et al., 2021), in the layout of Llama: halves, not pairs.
    """
    num_tokens, head_dim = table.shape
    check_shape("table", table, (len(x), None))
    if num_heads < 0 or x.shape[1] < num_heads * head_dim:
        raise ValueError(f"x {tuple(x.shape)} has no room for {num_heads} heads of {head_dim}")
    rows = _Rows(x=x.data_ptr(), y=table.data_ptr(), x_stride=x.stride(0))
    rows.y_stride, rows.num_rows, rows.width = table.stride(0), num_tokens, head_dim
    rows.num_heads = num_heads
    _run(_functions().rotate, rows, multiple=2 * WIDTH_MULTIPLE, x=x, table=table)


def _run(
    function: Any, rows: _Rows, *, multiple: int = WIDTH_MULTIPLE, **tensors: Tensor | None
) -> None:
    """Check what all three want, choose the threads, and call."""
    if rows.width % multiple:
        raise ValueError(f"rows are {rows.width} wide, which is no multiple of {multiple}")
    dtype = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        dtype = dtype or tensor.dtype
        check_dtype(name, tensor, dtype)
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: rows must be contiguous")
    if dtype not in _DTYPES:
        raise ValueError(f"{next(iter(tensors))}: dtype {dtype} is neither float32 nor bfloat16")
    elements = rows.num_rows * rows.width * max(1, rows.num_heads)
    rows.is_bf16 = dtype is torch.bfloat16
    rows.num_threads = torch.get_num_threads() if elements >= _LEAST_PARALLEL_ELEMENTS else 1
    function(byref(rows))


class _Functions:
    """The library's entry points, declared once."""

    def __init__(self) -> None:
        loaded = library()
        self.rms_norm = loaded.octavo_rms_norm
        self.silu_mul = loaded.octavo_silu_mul
        self.rotate = loaded.octavo_rotate
        for function in (self.rms_norm, self.silu_mul, self.rotate):
            function.argtypes = (POINTER(_Rows),)
            function.restype = None


_functions = functools.cache(_Functions)
