"""Matrix products by a weight that was packed once, for the rows of a step.

Ours because oneDNN's product, which reorders nothing either once its weight is packed,
reaches 60 to 90% of this one at the 1 to 64 rows of most steps (docs/kernels.md). And
here a row's outputs are the same to the bit whatever rows are computed beside it.
"""

from __future__ import annotations

import functools
import platform
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from octavo_kernels.checks import check_contiguous, check_dtype, check_shape
from octavo_kernels.cpu.build import KernelsUnavailable
from octavo_kernels.cpu.library import library

_DTYPES = (torch.float32, torch.bfloat16)


class LinearArguments(Structure):
    """`octavo_linear` of csrc/octavo.h."""

    _fields_ = (
        *[(name, c_void_p) for name in ("x", "weight", "bias", "out")],
        *[(name, c_int64) for name in ("x_stride", "num_rows", "num_in", "num_out")],
        *[(name, c_int32) for name in ("is_bf16", "num_threads", "is_gated")],
    )


class _Packing(Structure):
    """`octavo_packing` of csrc/linear.c."""

    _fields_ = (
        *[(name, c_void_p) for name in ("weight", "packed")],
        *[(name, c_int64) for name in ("row_stride", "num_in", "num_out")],
        *[(name, c_int32) for name in ("is_bf16", "num_threads")],
    )


class _Unpacking(Structure):
    """`octavo_unpacking` of csrc/linear.c."""

    _fields_ = (
        *[(name, c_void_p) for name in ("weight", "indices", "out")],
        *[(name, c_int64) for name in ("num_rows", "num_in")],
        *[(name, c_int32) for name in ("is_bf16", "num_threads")],
    )


def is_worthwhile(weight: Tensor) -> bool:
    """Whether this product is for this machine and weight: it was measured on x86 only."""
    if platform.machine() not in {"x86_64", "AMD64"} or weight.dtype not in _DTYPES:
        return False
    try:
        functions = _functions()
    except KernelsUnavailable:
        return False
    if weight.dtype is torch.float32:
        return True
    features = torch.cpu.get_capabilities()
    if weight.shape[1] % 2:
        return False  # words are of two inputs
    if features.get("amx_bf16"):
        return False  # oneDNN multiplies tiles there
    return functions.has_bf16 or not features.get("avx512_bf16")


def packed_size(num_out: int, num_in: int) -> int:
    """Elements of a packed weight."""
    width = _functions().panel_width
    return -(-num_out // width) * width * num_in


class PackedLinear:
    """A weight, packed, and its product with rows. For one thread at a time.

    `arguments` are those of the compiled product; they point into this object.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, room: Tensor | None = None) -> None:
        """Pack a weight; it is of no use afterwards.

        Args:
            weight: [num_out, num_in] fp32 or bf16, an even num_in of those.
            bias: [num_out] of its dtype, added to each product.
            room: [packed_size(num_out, num_in)] of its dtype, contiguous, to pack into.

        Raises:
            ValueError: if a shape or dtype does not fit.
            KernelsUnavailable: if the compiled kernels cannot be had here.
        """
        check_shape("weight", weight, (None, None))
        self.num_out, self.num_in = weight.shape
        self.dtype = weight.dtype
        self._check(weight, bias)
        functions = _functions()
        self._multiply = functions.multiply
        size = packed_size(self.num_out, self.num_in)
        room = torch.empty(size, dtype=self.dtype) if room is None else room
        check_shape("room", room, (size,))
        check_contiguous("room", room)
        check_dtype("room", room, self.dtype)
        is_bf16 = self.dtype is torch.bfloat16
        self.weight = room
        functions.pack(
            byref(
                _Packing(
                    weight=weight.data_ptr(),
                    packed=room.data_ptr(),
                    row_stride=weight.stride(0),
                    num_in=self.num_in,
                    num_out=self.num_out,
                    is_bf16=is_bf16,
                    num_threads=torch.get_num_threads(),
                )
            )
        )
        self._bias = None
        if bias is not None:
            self._bias = torch.zeros(size // self.num_in)
            self._bias[: self.num_out] = bias
        self.arguments = LinearArguments(
            weight=self.weight.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_in=self.num_in,
            num_out=self.num_out,
            is_bf16=is_bf16,
        )

    def _check(self, weight: Tensor, bias: Tensor | None) -> None:
        check_dtype("weight", weight, *_DTYPES)
        if bias is not None:
            check_shape("bias", bias, (self.num_out,))
            check_dtype("bias", bias, self.dtype)
        if not self.num_in:
            raise ValueError("weight has no inputs")
        if self.num_in % 2 and self.dtype is torch.bfloat16:
            raise ValueError(f"weight: {self.num_in} inputs in bfloat16 are not an even number")
        if weight.stride(1) != 1:
            raise ValueError("weight: rows must be contiguous")

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply.

        Args:
            x: [num_rows, num_in] of the weight's dtype, rows contiguous.
        Returns: [num_rows, num_out].

        Raises:
            ValueError: if x is not so.
        """
        if x.dtype != self.dtype or x.dim() != 2 or x.shape[1] != self.num_in:
            raise ValueError(
                f"x {tuple(x.shape)} {x.dtype} is not (rows, {self.num_in}) {self.dtype}"
            )
        if x.stride(1) != 1:
            raise ValueError("x: rows must be contiguous")
        num_rows = len(x)
        out = torch.empty((num_rows, self.num_out), dtype=self.dtype)
        call = self.arguments
        call.x, call.x_stride, call.out = x.data_ptr(), x.stride(0), out.data_ptr()
        call.num_rows, call.num_threads = num_rows, torch.get_num_threads()
        self._multiply(byref(call))
        return out

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight as it was before it was packed.

        Args:
            indices: [num_rows] int64, contiguous, each from 0 to num_out - 1.
        Returns: [num_rows, num_in] of the weight's dtype.

        Raises:
            ValueError: if an index is out of bounds, or `indices` is not so.
        """
        check_shape("indices", indices, (None,))
        check_dtype("indices", indices, torch.int64)
        check_contiguous("indices", indices)
        num_rows = len(indices)
        out = torch.empty((num_rows, self.num_in), dtype=self.dtype)
        if num_rows and not 0 <= int(indices.min()) <= int(indices.max()) < self.num_out:
            raise ValueError(f"indices are not all in [0, {self.num_out - 1}]")
        _functions().unpack(
            byref(
                _Unpacking(
                    weight=self.weight.data_ptr(),
                    indices=indices.data_ptr(),
                    out=out.data_ptr(),
                    num_rows=num_rows,
                    num_in=self.num_in,
                    is_bf16=self.dtype is torch.bfloat16,
                    num_threads=torch.get_num_threads(),
                )
            )
        )
        return out


class _Functions:
    """The library's entry points, declared once.

    `panel_width` is how many outputs lie beside one another in a packed weight, `has_bf16`
    whether the library multiplies bf16 by the processor's own instruction.
    """

    def __init__(self) -> None:
        loaded = library()
        self.multiply, self.pack = loaded.octavo_multiply, loaded.octavo_pack_linear
        self.unpack = loaded.octavo_unpack_rows
        for function, argument in (
            (self.multiply, LinearArguments),
            (self.pack, _Packing),
            (self.unpack, _Unpacking),
        ):
            function.argtypes = (POINTER(argument),)
            function.restype = None
        loaded.octavo_panel_width.argtypes = loaded.octavo_has_bf16.argtypes = ()
        self.has_bf16 = bool(loaded.octavo_has_bf16())
        self.panel_width = int(loaded.octavo_panel_width())


_functions = functools.cache(_Functions)
