"""What holds for every test: Triton's interpreter, a Ctrl-C that works, logging of its own.

Triton reads its variable when it is imported, and so do the kernels. Other conftests
bring Triton along before pytest is configured, so it is set before they are read.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
import structlog

os.environ["TRITON_INTERPRET"] = "1"

# A shell that starts the tests in the background has SIGINT ignored, which every
# process that a test starts and then interrupts would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Interpret kernels, except under `-m gpu`, which is an error where there is no GPU."""
    if config.option.markexpr != "gpu":
        return
    del os.environ["TRITON_INTERPRET"]
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("there is no GPU here: nothing was checked")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a test configured: no later test may log where an earlier one looked."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
