"""Where Triton's kernels are tested: in its interpreter, or on a GPU under `-m gpu`."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_configure() -> None:
    """Hand bfloat16 operands of a dot on as float32: the interpreter multiplies their bits."""
    # Not before tests/conftest.py has chosen the interpreter.
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    narrow = InterpreterBuilder.create_dot

    def widened(self: InterpreterBuilder, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = self.cast_impl(a, tl.float32), self.cast_impl(b, tl.float32)
        return narrow(self, a, b, *rest)

    InterpreterBuilder.create_dot = widened


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fill in `device`, as tests/conftest.py chose."""
    if "device" in metafunc.fixturenames:
        on_gpu = metafunc.config.option.markexpr == "gpu"
        device = pytest.param("cuda", marks=pytest.mark.gpu) if on_gpu else pytest.param("cpu")
        metafunc.parametrize("device", [device])
