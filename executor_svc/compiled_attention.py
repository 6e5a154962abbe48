"""Paged attention on a CPU, through the compiled kernels."""

from __future__ import annotations

import numpy as np
import torch
from octavo_kernels.cpu.plans import Plans, WritePlan, plan_decode, plan_prefill
from torch import Tensor

from executor_svc.attention import AttentionCall
from executor_svc.batch import StepBatch
from executor_svc.pool import KvPool


class CompiledStep:
    """A step over the pool with the compiled kernels.

    Who works on what is laid out once, at the first layer that asks, and for each sliding
    window apart.
    """

    name = "compiled"

    def __init__(self, pool: KvPool, batch: StepBatch) -> None:
        self.pool = pool
        self._num_decodes = batch.num_decodes
        self._writes = WritePlan(torch.from_numpy(batch.slots), pool.keys[0])
        kept = batch.kept_tokens  # sequences' last ones, in order, and then those of prompts
        self.kept = torch.from_numpy(np.unique(kept) if batch.prompt_spans else kept)
        """[num_kept] int64, places of the tokens whose logits are wanted, each once."""
        self._tables = torch.from_numpy(np.ascontiguousarray(batch.block_tables))
        self._lengths = torch.from_numpy(batch.context_lens)
        self._starts = torch.from_numpy(batch.chunk_starts - batch.num_decodes)
        self._plans: dict[int | None, Plans] = {}

    @property
    def slots(self) -> Tensor:
        """[num_tokens] int64, where the step's K/V go."""
        return self._writes.slots

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the step's K/V of this layer, then attend every token to its context."""
        keys, values = self.pool.keys[call.layer], self.pool.values[call.layer]
        self._writes.run(key, value, keys, values)
        decode, prefill = self.plans(query.shape[1], call.sliding_window)
        out = torch.empty(query.shape, dtype=query.dtype)
        decodes = self._num_decodes
        scale, softcap = call.scale, call.softcap
        if decodes:
            part = query[:decodes], keys, values, out[:decodes]
            decode.run(*part, scale=scale, softcap=softcap)
        if decodes < len(query):
            part = query[decodes:], keys, values, out[decodes:]
            prefill.run(*part, scale=scale, softcap=softcap)
        return out

    def plans(self, num_heads: int, sliding_window: int | None) -> Plans:
        """The step's decodes and chunks, laid out for a model of so many heads."""
        plans = self._plans.get(sliding_window)
        if plans is None:
            plans = self._plans[sliding_window] = self._lay_out(num_heads, sliding_window)
        return plans

    def _lay_out(self, num_heads: int, sliding_window: int | None) -> Plans:
        decodes, keys = self._num_decodes, self.pool.keys[0]
        decode = plan_decode(
            self._tables[:decodes],
            self._lengths[:decodes],
            key_cache=keys,
            num_heads=num_heads,
            sliding_window=sliding_window,
        )
        prefill = plan_prefill(
            self._tables[decodes:],
            self._lengths[decodes:],
            query_starts=self._starts,
            key_cache=keys,
            num_heads=num_heads,
            sliding_window=sliding_window,
        )
        return decode, prefill
