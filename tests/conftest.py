"""Triton's interpreter for the whole session, unless a GPU is what is tested.

Triton reads the variable when it is imported, and so do the kernels; some test's imports
bring Triton along before the kernels' own tests are collected.
"""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Interpret kernels, except under `-m gpu`, which is an error where there is no GPU."""
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
        return
    os.environ.pop("TRITON_INTERPRET", None)
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("there is no GPU here: nothing was checked")
