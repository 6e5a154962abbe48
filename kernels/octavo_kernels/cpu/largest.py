"""The largest logit of each row, and where it stands, in one pass over memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from octavo_kernels.checks import check_dtype, check_shape
from octavo_kernels.cpu.library import library


class _Arguments(Structure):
    """`octavo_largest_call` of csrc/largest.c."""

    _fields_ = (
        *[(name, c_void_p) for name in ("x", "places")],
        *[(name, c_int64) for name in ("stride", "num_rows", "width")],
        *[(name, c_int32) for name in ("is_bf16", "num_threads")],
    )


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Find the largest element of each row; a NaN is larger than everything.

    Args:
        x: [num_rows, width] fp32 or bf16 on a CPU, rows contiguous, width at least 1.
    Returns: [num_rows] in x's dtype, the largest elements, and [num_rows] int64, where they
        stand: of equal ones the first.

    Raises:
        ValueError: if x is not so.
        KernelsUnavailable: if the compiled kernels cannot be had here.
    """
    check_shape("x", x, (None, None))
    check_dtype("x", x, torch.float32, torch.bfloat16)
    num_rows, width = x.shape
    if not width or x.stride(1) != 1 or not x.is_cpu:
        raise ValueError(f"x {tuple(x.shape)} is empty, or its rows not contiguous on a CPU")
    places = torch.empty(num_rows, dtype=torch.int64)
    call = _Arguments(
        x=x.data_ptr(),
        places=places.data_ptr(),
        stride=x.stride(0),
        num_rows=num_rows,
        width=width,
        is_bf16=x.dtype is torch.bfloat16,
        num_threads=torch.get_num_threads(),
    )
    _function()(byref(call))
    return x.gather(1, places[:, None])[:, 0], places


@functools.cache
def _function() -> Callable[..., None]:
    function = library().octavo_largest
    function.argtypes, function.restype = (POINTER(_Arguments),), None
    return function
