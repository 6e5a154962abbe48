"""Make Triton's interpreter multiply matrices of bfloat16."""

from __future__ import annotations

from typing import Any


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
