"""Small arrays to the device and back, and marks in its work, without waiting for it.

On a GPU work is queued, and the host runs ahead. A copy from or to ordinary memory would
end that: it waits for all that was queued before it. So everything goes through pinned
memory, and only `Fetch.wait` and `Mark.wait` wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT_BYTES = 16
"""A kernel is compiled anew for a pointer of another alignment than this."""

Array = npt.NDArray[np.generic]


def send(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device in one piece, each aligned to 16 bytes, without waiting.

    On a CPU nothing is copied: the tensors are the arrays, as far as they are contiguous.
    """
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // _ALIGNMENT_BYTES) for array in arrays]) * _ALIGNMENT_BYTES
    staging = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=True)
    places = [0, *ends[:-1].tolist()]
    for array, place in zip(arrays, places, strict=True):
        part = staging[place : place + array.nbytes].numpy()
        part[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    # Pinned memory is not used again before the copy has read it: torch sees to that.
    sent = staging.to(device, non_blocking=True)
    return [
        sent[place : place + array.nbytes]
        .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        .view(array.shape)
        for array, place in zip(arrays, places, strict=True)
    ]


def to_device(array: Array, device: torch.device) -> Tensor:
    """One array on the device, as by `send`."""
    return send([array], device)[0]


class Mark:
    """A point in the work of a device: passed when everything before it is done."""

    def __init__(self, device: torch.device) -> None:
        """Put it behind what the device has been given so far."""
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped there
            self._event.record(torch.cuda.current_stream(device))
        else:
            self._ns = time.perf_counter_ns()

    @property
    def is_passed(self) -> bool:
        """Never waits."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]  # untyped there

    def wait(self) -> None:
        """Return once it is passed."""
        if self._event is not None:
            self._event.synchronize()

    def ns_since(self, earlier: Mark) -> int:
        """Nanoseconds of the device's time between two marks that are passed."""
        if self._event is None or earlier._event is None:
            return self._ns - earlier._ns
        return int(earlier._event.elapsed_time(self._event) * 1e6)


class Fetch:
    """Tensors of one device on their way to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Begin to copy them; what they hold later does not count."""
        self._tensors = [_begin_copy(tensor) for tensor in tensors]
        self.end = Mark(tensors[0].device)

    def wait(self) -> list[npt.NDArray[np.generic]]:
        """The arrays, once they are there."""
        self.end.wait()
        return [tensor.numpy() for tensor in self._tensors]


def _begin_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
