"""Paged attention on a CPU, through the compiled kernels."""

from __future__ import annotations

import numpy as np
import torch
from octavo_kernels.cpu.plans import AttentionPlan, WritePlan, plan_decode, plan_prefill
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
        self._pool = pool
        self._num_decodes = batch.num_decodes
        self._writes = WritePlan(torch.from_numpy(batch.slots), pool.keys[0])
        self._tables = torch.from_numpy(np.ascontiguousarray(batch.block_tables))
        self._lengths = torch.from_numpy(batch.context_lens)
        self._starts = torch.from_numpy(batch.chunk_starts - batch.num_decodes)
        self._plans: dict[int | None, tuple[AttentionPlan, AttentionPlan]] = {}

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the step's K/V of this layer, then attend every token to its context."""
        keys, values = self._pool.keys[call.layer], self._pool.values[call.layer]
        self._writes.run(key, value, keys, values)
        plans = self._plans.get(call.sliding_window)
        if plans is None:
            plans = self._lay_out(keys, query.shape[1], call.sliding_window)
            self._plans[call.sliding_window] = plans
        out = torch.empty(query.shape, dtype=query.dtype)
        decodes, (decode, prefill) = self._num_decodes, plans
        scale, softcap = call.scale, call.softcap
        if decodes:
            part = query[:decodes], keys, values, out[:decodes]
            decode.run(*part, scale=scale, softcap=softcap)
        if decodes < len(query):
            part = query[decodes:], keys, values, out[decodes:]
            prefill.run(*part, scale=scale, softcap=softcap)
        return out

    def _lay_out(
        self, keys: Tensor, num_heads: int, sliding_window: int | None
    ) -> tuple[AttentionPlan, AttentionPlan]:
        decodes = self._num_decodes
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
