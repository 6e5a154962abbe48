"""What stands between a decoder layer's matrix products, compiled: one pass over each row.

Torch needs six operators for a norm and ten for a rotation, each with its own trip through
memory and its own start of the threads. Sums are in fp32; a row is the same to the bit
whatever rows stand beside it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from octavo_kernels.checks import check_shape
from octavo_kernels.cpu.library import library

_DTYPES = (torch.float32, torch.bfloat16)

WIDTH_MULTIPLE = 32
"""Widths that the kernels take are multiples of this, whatever the CPU."""


class _Rows(Structure):
    """`octavo_rows` of csrc/octavo.h."""

    _fields_ = (
        *[(name, c_void_p) for name in ("x", "y", "weight", "out")],
        *[(name, c_int64) for name in ("x_stride", "y_stride", "out_stride")],
        *[(name, c_int64) for name in ("num_rows", "width", "num_heads")],
        ("epsilon", c_float),
        *[(name, c_int32) for name in ("is_bf16", "num_threads")],
    )


class NormPlan:
    """`rms_norm` of one tensor, again and again: checked once, and into one place.

    For one thread at a time.
    """

    def __init__(self, x: Tensor) -> None:
        """Plan for x: [num_rows, width] fp32 or bf16, rows contiguous.

        Raises:
            ValueError: if the width is no multiple of 32, or the dtype another.
            KernelsUnavailable: if the compiled kernels cannot be had here.
        """
        check_shape("x", x, (None, None))
        num_rows, width = x.shape
        self._layout = _Layout("x", x, num_rows, width)
        self._x, self._out = x, torch.empty((num_rows, width), dtype=x.dtype)
        self._rows = rows = self._layout.rows()
        rows.x, rows.x_stride = x.data_ptr(), x.stride(0)
        rows.out, rows.out_stride = self._out.data_ptr(), width
        self._function = _functions().rms_norm

    def run(self, weight: Tensor, epsilon: float, delta: Tensor | None = None) -> Tensor:
        """See `rms_norm`; the next run overwrites what this one returns."""
        rows = self._rows
        if weight.shape != self._x.shape[1:] or weight.dtype != self._x.dtype:
            raise ValueError(_misfit("weight", weight, self._x.shape[1:], self._x.dtype))
        rows.weight, rows.epsilon, rows.y = weight.data_ptr(), epsilon, None
        if delta is not None:
            self._layout.check("delta", delta, self._x.shape)
            rows.y, rows.y_stride = delta.data_ptr(), delta.stride(0)
        self._function(byref(rows))
        return self._out


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
    return NormPlan(x).run(weight, epsilon, delta)


class SiluMulPlan:
    """`silu_mul` of tensors of one shape: checked once, and into one place.

    For one thread at a time.
    """

    def __init__(self, num_rows: int, twice: int, dtype: torch.dtype) -> None:
        """Plan for gate_up: [num_rows, twice].

        Raises:
            ValueError: if half the width is no multiple of 32, or the dtype another.
            KernelsUnavailable: if the compiled kernels cannot be had here.
        """
        if twice % 2:
            raise ValueError(f"gate_up ({num_rows}, {twice}) has no two halves")
        width = twice // 2
        self._out = torch.empty((num_rows, width), dtype=dtype)
        self._layout = _Layout("gate_up", self._out, num_rows, width)
        self._shape = torch.Size((num_rows, twice))
        self._rows = rows = self._layout.rows()
        rows.out, rows.out_stride = self._out.data_ptr(), width
        self._half_bytes = width * self._out.element_size()
        self._function = _functions().silu_mul

    def run(self, gate_up: Tensor) -> Tensor:
        """See `silu_mul`; the next run overwrites what this one returns."""
        self._layout.check("gate_up", gate_up, self._shape)
        rows, gates = self._rows, gate_up.data_ptr()
        rows.x, rows.y = gates, gates + self._half_bytes
        rows.x_stride = rows.y_stride = gate_up.stride(0)
        self._function(byref(rows))
        return self._out


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
    return SiluMulPlan(num_rows, twice, gate_up.dtype).run(gate_up)


class RotatePlan:
    """`rotate_` by one table: checked once. For one thread at a time."""

    def __init__(self, table: Tensor, num_heads: int) -> None:
        """Plan for a table and so many heads.

        Raises:
            ValueError: if head_dim is no multiple of 64, or the dtype another.
            KernelsUnavailable: if the compiled kernels cannot be had here.
        """
        check_shape("table", table, (None, None))
        num_tokens, head_dim = table.shape
        if num_heads < 0:
            raise ValueError(f"x has no room for {num_heads} heads")
        self._table, self._needed = table, num_heads * head_dim
        self._layout = _Layout(
            "table", table, num_tokens, head_dim, num_heads=num_heads, multiple=2 * WIDTH_MULTIPLE
        )
        self._rows = rows = self._layout.rows()
        rows.y, rows.y_stride = table.data_ptr(), table.stride(0)
        self._function = _functions().rotate

    def run(self, x: Tensor) -> None:
        """See `rotate_`."""
        rows = self._rows
        self._layout.check("x", x, None)
        if len(x) != len(self._table):
            raise ValueError(f"table {tuple(self._table.shape)} has not {len(x)} rows")
        if x.shape[1] < self._needed:
            raise ValueError(
                f"x {tuple(x.shape)} has no room for {rows.num_heads} heads of {rows.width}"
            )
        rows.x, rows.x_stride = x.data_ptr(), x.stride(0)
        self._function(byref(rows))


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
    RotatePlan(table, num_heads).run(x)


class _Layout:
    """What a plan's tensors have in common."""

    def __init__(
        self,
        name: str,
        tensor: Tensor,
        num_rows: int,
        width: int,
        *,
        num_heads: int = 0,
        multiple: int = WIDTH_MULTIPLE,
    ) -> None:
        if width % multiple:
            raise ValueError(f"rows are {width} wide, which is no multiple of {multiple}")
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name}: dtype {tensor.dtype} is neither float32 nor bfloat16")
        self._dtype = tensor.dtype
        self._num_rows, self._width, self._num_heads = num_rows, width, num_heads
        self.check(name, tensor, None)

    def check(self, name: str, tensor: Tensor, shape: torch.Size | None) -> None:
        """Require the dtype, rows that are contiguous, and the shape, if one is given."""
        if tensor.dtype != self._dtype or (shape is not None and tensor.shape != shape):
            raise ValueError(_misfit(name, tensor, shape, self._dtype))
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}: rows must be contiguous")

    def rows(self) -> _Rows:
        """The arguments, without pointers; the threads are those of torch now."""
        return _Rows(
            num_rows=self._num_rows,
            width=self._width,
            num_heads=self._num_heads,
            is_bf16=self._dtype is torch.bfloat16,
            num_threads=torch.get_num_threads(),
        )


def _misfit(name: str, tensor: Tensor, shape: Sequence[int] | None, dtype: torch.dtype) -> str:
    wanted = "" if shape is None else f"{tuple(shape)} "
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} is not {wanted}{dtype}"


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
