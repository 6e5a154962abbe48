"""Matrix products of an executor on a CPU.

Every fast product wants its weights in an order of its own. Torch's plain product makes
that order anew in every call, for fp32 as for bf16: at the 64 rows of a busy step that is
a quarter to a half of its time, at a few rows more. So weights are reordered once: for the
product of `octavo_kernels`, or for oneDNN's where that is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from octavo_kernels.cpu.linear import PackedLinear, is_worthwhile, packed_size
from torch import Tensor, nn
from torch.nn.functional import linear

from executor_svc.huge_pages import Slabs
from executor_svc.tensor_parallel.ranks import concatenate_over_ranks, sum_over_ranks

_TYPICAL_ROWS = 64
"""The number of rows that the order is made for; it serves others nearly as well."""


class Linear:
    """One product in place of several that have the same input.

    No module of torch's: to call one takes as long as a small product.
    """

    def __init__(self, parts: Sequence[nn.Linear], slabs: Slabs, *, sums: bool = False) -> None:
        """Take the weights of `parts`, one below the other.

        Args:
            parts: of one width and dtype; of those that are cut over ranks, this rank's share.
            slabs: where a packed weight goes.
            sums: the parts are cut along their inputs: ranks add their products up.
        """
        weights = [local(part.weight) for part in parts]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = _stacked_bias(parts)
        self.num_out = len(weight)
        self.multiply = _product(weight, None if sums else bias, slabs)
        if sums:
            self.multiply = functools.partial(_sum_products, multiply=self.multiply, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        """Return: [rows, num_out] of x [rows, num_in]."""
        return self.multiply(x)

    def packed(self) -> PackedLinear | None:
        """The product, if it is one of ours and all of it."""
        return self.multiply if isinstance(self.multiply, PackedLinear) else None


def local(weight: Tensor) -> Tensor:
    """This rank's share of a weight: all of it, unless it is cut over ranks."""
    share: Tensor = weight.to_local() if is_cut(weight) else weight  # type: ignore[attr-defined]  # DTensor's
    return share.detach()


def is_cut(weight: Tensor) -> bool:
    """Whether ranks have a share of it each."""
    return hasattr(weight, "to_local")


def _sum_products(x: Tensor, multiply: Callable[[Tensor], Tensor], bias: Tensor | None) -> Tensor:
    product = multiply(x)
    sum_over_ranks(product)
    return product if bias is None else product.add_(bias)


def _product(weight: Tensor, bias: Tensor | None, slabs: Slabs) -> Callable[[Tensor], Tensor]:
    """The fastest product that this machine has, its weight in the order that it wants."""
    if is_worthwhile(weight):
        room = slabs.take(packed_size(*weight.shape), weight.dtype)
        return PackedLinear(weight, bias, room)
    if _can_pack(weight.dtype):
        return functools.partial(_multiply_packed, weight=_pack(weight), bias=bias)
    return functools.partial(linear, weight=weight, bias=bias)


class Embedding(nn.Module):
    """The embedding of a model whose logits are products with the same weight, packed once."""

    def __init__(self, packed: PackedLinear) -> None:
        """Read rows from `packed`."""
        super().__init__()
        self._packed = packed

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return: [..., width] of token_ids [...]."""
        rows = self._packed.rows(token_ids.flatten())
        return rows.view(*token_ids.shape, self._packed.num_in)


class Head(nn.Module):
    """A `Linear` that a model of transformers can hold, for its logits."""

    def __init__(self, part: nn.Linear, slabs: Slabs) -> None:
        """Take the weights of `part`; `slabs` as for `Linear`."""
        super().__init__()
        self.product = Linear([part], slabs)
        self.is_cut = is_cut(part.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return: [..., num_out] of x [..., num_in]; if ranks share it, of all of them."""
        product = self.product(x.flatten(0, -2))
        if self.is_cut:
            product = concatenate_over_ranks(product)
        return product.view(*x.shape[:-1], product.shape[-1])

    def embedding(self) -> Embedding | None:
        """An embedding of the same weight, if it is packed in our own order."""
        packed = None if self.is_cut else self.product.packed()
        return None if packed is None else Embedding(packed)


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Try it: these operators are torch's own, but not its public interface."""
    weight, x = torch.randn(32, 64).to(dtype), torch.randn(8, 64).to(dtype)
    try:
        product = _multiply_packed(x, _pack(weight), None)
    except (AttributeError, RuntimeError):
        return False  # the operators are missing, or the CPU's instructions for the dtype
    return torch.allclose(product.float(), linear(x.float(), weight.float()), rtol=0.02, atol=0.2)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    return packed


def _multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _stacked_bias(parts: Sequence[nn.Linear]) -> Tensor | None:
    """The biases one below the other; zeros for a part without one, if others have."""
    if all(part.bias is None for part in parts):
        return None
    return torch.cat(
        [
            local(part.weight).new_zeros(len(local(part.weight)))
            if part.bias is None
            else local(part.bias)
            for part in parts
        ]
    )
