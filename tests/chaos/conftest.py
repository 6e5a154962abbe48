"""What the chaos tests share: a small model, and a stack around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.model import write_model
from tests.chaos.stack import Layout, Stack

MakeStack = Callable[..., Stack]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with a tokenizer of bytes."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_stack(small_model: Path, tmp_path: Path) -> MakeStack:
    """Prepare services around the small model; options are those of Layout."""

    def make(**options: object) -> Stack:
        layout = Layout(model=small_model, folder=tmp_path, **options)  # type: ignore[arg-type]  # mixed
        return Stack(layout)

    return make
