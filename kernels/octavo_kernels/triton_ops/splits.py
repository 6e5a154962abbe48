"""Into how many parts decode cuts each context, and where the parts' results go."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

MAX_SPLITS = 64
_MIN_SPLIT_TOKENS = 256
_PROGRAMS_PER_PROCESSOR = 2
_WASTE_ALLOWED = 0.15


@lru_cache(maxsize=256)  # asked once per layer of a step
def choose_num_splits(
    num_seqs: int, num_kv_heads: int, max_context_len: int, num_processors: int
) -> int:
    """Say into how many parts each context is cut so that all processors have work.

    The fewest splits whose last wave of programs leaves processors almost as busy as
    the best number of splits would; one where sequences and heads fill the device.
    Depends on nothing that the device knows, so asking does not wait for it.

    Args:
        num_seqs: sequences of the batch, at least 1.
        num_kv_heads: KV heads of the model.
        max_context_len: upper bound of the contexts, in tokens.
        num_processors: streaming multiprocessors or compute units of the device.
    Returns: 1 to `MAX_SPLITS`; no split has fewer than 256 tokens of the longest context.
    """
    programs = num_seqs * num_kv_heads
    places = num_processors * _PROGRAMS_PER_PROCESSOR
    limit = min(MAX_SPLITS, max(1, max_context_len // _MIN_SPLIT_TOKENS))

    def busy(splits: int) -> float:
        waves = programs * splits / places
        return waves / math.ceil(waves)

    wanted = (1 - _WASTE_ALLOWED) * max(busy(splits) for splits in range(1, limit + 1))
    return next(splits for splits in range(1, limit + 1) if busy(splits) >= wanted)


class Scratch:
    """Working memory for the splits' results, kept from step to step.

    It only grows, and what it outgrew stays allocated: a captured CUDA graph may hold
    its address. `reserve` the largest step before capturing, and it never grows again.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.float32, device=device)
        self._outgrown: list[Tensor] = []

    def reserve(self, num_seqs: int, num_heads: int, num_splits: int, head_dim: int) -> None:
        """Make room for a step of this size."""
        needed = num_seqs * num_heads * num_splits * (head_dim + 1)
        if needed > self._memory.numel():
            self._outgrown.append(self._memory)
            self._memory = torch.empty(needed, dtype=torch.float32, device=self._memory.device)

    def take(
        self, num_seqs: int, num_heads: int, num_splits: int, head_dim: int
    ) -> tuple[Tensor, Tensor]:
        """Hand out room for results and their weights, with anything in it.

        Returns: [num_seqs, num_heads, num_splits, head_dim] and
            [num_seqs, num_heads, num_splits], both float32.
        """
        self.reserve(num_seqs, num_heads, num_splits, head_dim)
        rows = num_seqs * num_heads * num_splits
        results = self._memory[: rows * head_dim]
        weights = self._memory[rows * head_dim : rows * (head_dim + 1)]
        return (
            results.view(num_seqs, num_heads, num_splits, head_dim),
            weights.view(num_seqs, num_heads, num_splits),
        )
