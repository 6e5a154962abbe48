"""Owns the model and the pool: moves blocks, and turns a batch into logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from executor_svc.attention_choice import Attention
from executor_svc.batch import StepBatch
from executor_svc.drawn import Feed
from executor_svc.model_loader import LoadedModel, forward
from executor_svc.plan import Plan
from executor_svc.pool import KvPool
from executor_svc.transfer import send

if TYPE_CHECKING:  # needs Triton
    from executor_svc.cuda_graphs import DecodeGraphs


class ModelRunner:
    """Runs steps on one device.

    Not safe to share between threads: one thread owns the device.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KvPool,
        attention: Attention,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """Take a model and its pool.

        Args:
            loaded: the model.
            pool: on the model's device.
            attention: serves the pool.
            graphs: of this model over this pool, for the steps that they serve.
        """
        self._loaded = loaded
        self._attention = attention
        self._graphs = graphs
        self.pool = pool

    @property
    def device(self) -> torch.device:
        """Where model and pool are."""
        return self._loaded.device

    @property
    def attention(self) -> str:
        """Name of the attention implementation."""
        return self._attention.name

    def move_blocks(self, plan: Plan) -> None:
        """Swap out, copy, swap in, in this order; nothing is launched for an empty list."""
        if plan.swap_out_device_blocks:
            self.pool.swap_out(plan.swap_out_device_blocks, plan.swap_out_host_blocks)
        if plan.copy_sources:
            self.pool.copy(plan.copy_sources, plan.copy_destinations)
        if plan.swap_in_host_blocks:
            self.pool.swap_in(plan.swap_in_host_blocks, plan.swap_in_device_blocks)

    @torch.inference_mode()
    def forward(self, batch: StepBatch, feed: Feed | None = None) -> torch.Tensor:
        """Compute the batch's tokens, writing their K/V to the pool.

        Args:
            batch: the step.
            feed: its tokens that only the device knows.
        Returns: [num_kept, vocab_size] logits of `batch.kept_tokens`, which may be
            overwritten by the next call.
        """
        if self._graphs is not None and self._graphs.serves(batch):
            return self._graphs.forward(batch, feed)
        arrays = [batch.token_ids, batch.positions, batch.kept_tokens]
        token_ids, positions, kept = send(arrays, self.device)
        if feed is not None:
            feed.put_into(token_ids)
        return forward(self._loaded, token_ids, positions, self._attention.make_step(batch), kept)
