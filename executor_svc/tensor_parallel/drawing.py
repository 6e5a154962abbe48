"""One draw for all ranks: rank 0's."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.batch import StepBatch
from executor_svc.rows import RowTable
from executor_svc.sampler import Samples, sample
from executor_svc.tensor_parallel.ranks import Ranks


class SharedDraw:
    """Draws in rank 0 and gives the tokens to the others, from device to device."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(self, logits: Tensor, batch: StepBatch, rows: RowTable) -> Samples:
        """As `sampler.sample`; ranks that only receive know tokens, and nothing else.

        Raises:
            DeviceLost: if another rank is gone.
        """
        if self._ranks.place.leads:
            samples = sample(logits, batch, rows)
        else:
            size = len(batch.sample_rows)
            tokens = torch.zeros(size, dtype=torch.int64, device=logits.device)
            samples = Samples(tokens, torch.zeros(size, device=logits.device), [])
        if len(samples.tokens):
            self._ranks.broadcast(samples.tokens)
        return samples
