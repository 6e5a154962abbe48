"""Matrix products of an executor on a CPU.

fp32 goes to the BLAS of torch as it is: at the 64 rows and more of a busy step it runs
within a fifth of the cores' peak, and packing the weights first gains nothing. bf16 does
gain: oneDNN wants the weights in an order of its own, and would otherwise make it anew in
every call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Linear(nn.Module):
    """One product in place of several that have the same input."""

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        """Take the weights of `parts`, one below the other.

        Args:
            parts: of one width and dtype. A single fp32 weight is shared, not copied.
        """
        super().__init__()
        weights = [part.weight.detach() for part in parts]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self.bias = _stacked_bias(parts)
        self.is_packed = weight.dtype is torch.bfloat16 and _can_pack()
        self.weight = _pack(weight) if self.is_packed else weight

    def forward(self, x: Tensor) -> Tensor:
        """Return: [..., num_out] of x [..., num_in]."""
        if self.is_packed:
            return _multiply_packed(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add the product of x [rows, num_in] to `total` [rows, num_out], in place."""
        if self.is_packed:
            total += self(x)
            return
        total.addmm_(x, self.weight.t())
        if self.bias is not None:
            total += self.bias


@functools.cache
def _can_pack() -> bool:
    """Try it: these operators are torch's own, not its public interface."""
    weight = torch.randn(32, 64, dtype=torch.bfloat16)
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    try:
        product = _multiply_packed(x, _pack(weight), None)
    except (AttributeError, RuntimeError):
        return False  # an operator or the CPU's bf16 instructions are missing
    return torch.allclose(product.float(), linear(x.float(), weight.float()), rtol=0.02, atol=0.2)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
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
            part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach()
            for part in parts
        ]
    )
