"""What a CUDA graph cannot hold is found without a GPU.

Tensors of torch's meta device have no values: what would wait for a GPU, or copy to or
from it, is told from the rest as it would be there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from executor_svc.capture_guard import CaptureGuard, NotCapturable

META = torch.device("meta")
PLACES = torch.tensor([0, 1])

WAITS = {
    "item": lambda x: x[0, 0].item(),
    "float": lambda x: float(x.sum()),
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x[:, 0].long(), dim=0),
    "read by a mask": lambda x: x[x > 0],
    "written by a mask": lambda x: x.__setitem__(x > 0, x[0, 0]),
}
COPIES = {
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to the host": lambda x: x.to("cpu", torch.bfloat16),
    "from the host": lambda x: x.copy_(torch.tensor(1.0)),
    "to the device": lambda x: torch.tensor(1.0).to(x.device),
}
HOST_TENSORS = {
    "zeros": lambda x: torch.zeros(3),
    "arange": lambda x: torch.arange(x.shape[0]),
    "tensor": lambda x: torch.tensor([1.0, 2.0]),
    "from_numpy": lambda x: torch.from_numpy(np.zeros(3)).to(x.device),
    "made before": lambda x: x[PLACES],
}
LEGAL = {
    "arithmetic": lambda x: (x @ x.T).softmax(-1) + 1,
    "read by places": lambda x: x[torch.zeros(2, dtype=torch.int64, device=x.device)],
    "a choice by a mask": lambda x: torch.where(x > 0, x, 0.0).masked_fill_(x < 0, 1.0),
    "a new tensor": lambda x: torch.arange(3, device=x.device) + torch.empty_like(x).sum(),
    "another dtype": lambda x: x.to(torch.bfloat16),
    "a number on the host": lambda x: x * torch.tensor(3.0),
}

Offence = Callable[[Tensor], object]


@pytest.mark.parametrize(
    ("offence", "why"),
    [
        *[pytest.param(offence, "tells|counts", id=name) for name, offence in WAITS.items()],
        *[pytest.param(offence, "copies between", id=name) for name, offence in COPIES.items()],
        *[pytest.param(each, "tensor on the host", id=name) for name, each in HOST_TENSORS.items()],
    ],
)
def test_an_offence_is_named(offence: Offence, why: str) -> None:
    """Waiting for the device, copying from or to the host, and tensors made on it."""
    x = torch.empty(3, 2, device=META)
    with CaptureGuard(META), pytest.raises(NotCapturable, match=rf"^aten\.\w+\.\w+ .*({why})"):
        offence(x)


@pytest.mark.parametrize("work", [pytest.param(work, id=name) for name, work in LEGAL.items()])
def test_work_on_the_device_passes(work: Offence) -> None:
    """Whatever a graph can hold is let through, with its result."""
    with CaptureGuard(META):
        result = work(torch.empty(3, 2, device=META))
    assert isinstance(result, Tensor)
    assert result.device == META


@pytest.mark.parametrize("name", ["item", "read by a mask", "nonzero", "unique"])
def test_waiting_is_found_on_the_host_too(name: str) -> None:
    """Where tests run the kernels in the interpreter, with values."""
    x = torch.tensor([[1.0, -1.0]])
    with CaptureGuard(x.device), pytest.raises(NotCapturable):
        WAITS[name](x)


def test_literals_are_found_on_the_host_too() -> None:
    """Data of the host's becomes a tensor, whatever device it is for."""
    with CaptureGuard(torch.device("cpu")), pytest.raises(NotCapturable):
        torch.from_numpy(np.zeros(3))
