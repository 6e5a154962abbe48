"""Triton's interpreter for the whole session, unless a GPU is what is tested.

Triton reads the variable when it is imported, and so do the kernels. Other conftests
bring Triton along before pytest is configured, so it is set before they are read.
"""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Interpret kernels, except under `-m gpu`, which is an error where there is no GPU."""
    if config.option.markexpr != "gpu":
        return
    del os.environ["TRITON_INTERPRET"]
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("there is no GPU here: nothing was checked")
