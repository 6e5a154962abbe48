"""Finds what a model does that a CUDA graph cannot hold, before one is recorded.

A graph repeats launches. What waits for the device breaks the recording off, and leaves
torch's allocator in the middle of one; what copies from the host's memory would copy from
the same place in every replay, whatever stands there by then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_COPIES = {_aten.copy_, _aten._to_copy}
_MASKS = {torch.bool, torch.uint8}


class NotCapturable(RuntimeError):
    """A CUDA graph cannot hold this operator; the message names it and says why."""


class CaptureGuard(TorchDispatchMode):
    """Refuses torch's operators that are illegal in a graph, as a context around them.

    Numbers on the host are no offence: they are launched by value. On the host itself, as
    in tests, no copy can be told from work, but all else is found.
    """

    def __init__(self, device: torch.device) -> None:
        """Guard what runs on `device`."""
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._kind = device.type

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        _check_results(func, args)
        self._check_operands(func, args, kwargs)
        result = func(*args, **kwargs)
        data = func.overloadpacket is _aten.lift_fresh
        if any(tensor.dim() and (data or self._is_foreign(tensor)) for tensor in _tensors(result)):
            raise NotCapturable(f"{func} makes a tensor on the host")
        return result

    def _is_foreign(self, tensor: Tensor) -> bool:
        return tensor.device.type != self._kind

    def _check_operands(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what reads the host's memory, or writes to it."""
        foreign = list(filter(self._is_foreign, _tensors((args, kwargs))))
        if func.overloadpacket in _COPIES:
            target = torch.device(kwargs.get("device") or self._kind)
            if foreign or target.type != self._kind:
                raise NotCapturable(f"{func} copies between host and device")
        if any(tensor.dim() for tensor in foreign):
            raise NotCapturable(f"{func} takes a tensor on the host")


def _check_results(func: Any, args: tuple[Any, ...]) -> None:
    """Refuse what the host must wait for: a value, or how many there are."""
    if torch.Tag.data_dependent_output in func.tags:
        raise NotCapturable(f"{func} tells the host a value")
    if func.overloadpacket in _INDEXING:
        counted = any(index.dtype in _MASKS for index in _tensors(args[1]))
    else:
        counted = torch.Tag.dynamic_output_shape in func.tags
    if counted:
        raise NotCapturable(f"{func} counts on the device how many it is about")


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
