"""Paged attention on a GPU, through the Triton kernels.

A step's integers go to the device together, in one copy from pinned memory that nothing
waits for; after it no layer asks the device anything, so the host runs ahead of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from octavo_kernels.triton_ops.paged_attention import paged_attention
from octavo_kernels.triton_ops.prefill_attention import prefill_attention
from octavo_kernels.triton_ops.reshape_and_cache import reshape_and_cache
from octavo_kernels.triton_ops.splits import Scratch
from torch import Tensor

from executor_svc.attention import AttentionCall
from executor_svc.batch import StepBatch
from executor_svc.pool import KvPool
from executor_svc.transfer import send

_TABLE_COLUMNS = 16
"""A kernel is compiled anew for a stride of another alignment than 16."""


class TritonStep:
    """A step over the pool with the Triton kernels.

    Decodes and chunks each have tables and lengths of their own, so that the kernels find
    them aligned wherever the decodes end.
    """

    name = "triton"

    def __init__(
        self, pool: KvPool, batch: StepBatch, device: torch.device, scratch: Scratch
    ) -> None:
        """Lay the step out on the device.

        Args:
            pool: where K/V stand.
            batch: the step's tokens.
            device: the pool's.
            scratch: for decodes; the same one in every step.
        """
        decodes = self._num_decodes = batch.num_decodes
        self._pool = pool
        lengths, starts = batch.context_lens, batch.chunk_starts - decodes
        tables = _widen(batch.block_tables)
        # Known here, so that no kernel's launch need ask the device for them.
        longest_decode = int(lengths[:decodes].max(initial=0))
        self._longest_chunk = int(np.diff(starts).max(initial=0))
        (
            self._slots,
            decode_tables,
            decode_lens,
            self._chunk_tables,
            self._chunk_lens,
            self._chunk_starts,
        ) = send(
            [
                batch.slots,
                tables[:decodes],
                lengths[:decodes].astype(np.int32),
                tables[decodes:],
                lengths[decodes:].astype(np.int32),
                starts.astype(np.int32),
            ],
            device,
        )
        self._decodes = _Decodes(decode_tables, decode_lens, longest_decode, scratch)

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the step's K/V of this layer, then attend every token to its context."""
        keys, values = self._pool.keys[call.layer], self._pool.values[call.layer]
        reshape_and_cache(key, value, keys, values, self._slots)
        # A view of transformers' [heads, tokens] lies the kernels' way already, mostly.
        query = query.contiguous()
        out = torch.empty_like(query)
        decodes = self._num_decodes
        if decodes:
            self._decodes.attend(call, keys, values, query[:decodes], out[:decodes])
        if self._longest_chunk:
            prefill_attention(
                query[decodes:],
                keys,
                values,
                self._chunk_tables,
                query_starts=self._chunk_starts,
                context_lens=self._chunk_lens,
                scale=call.scale,
                sliding_window=call.sliding_window,
                softcap=call.softcap,
                out=out[decodes:],
                max_query_len=self._longest_chunk,
            )
        return out


class DecodeStep:
    """A step of decodes alone over tensors that stay where they are, for a CUDA graph.

    Nothing is laid out, sent or looked at here: what the tensors hold may change between
    two replays, where they are and how large may not.
    """

    def __init__(
        self,
        pool: KvPool,
        scratch: Scratch,
        *,
        slots: Tensor,
        tables: Tensor,
        lengths: Tensor,
        longest: int,
    ) -> None:
        """Take the step's tensors, all on the pool's device.

        Args:
            pool: where K/V stand.
            scratch: large enough already, or it grows while the graph is recorded.
            slots: [num_rows] int64, -1 for a row that only fills the batch up.
            tables: [num_rows, max_blocks] int32.
            lengths: [num_rows] int32, 0 for a row that only fills the batch up.
            longest: upper bound of what `lengths` will ever hold, in tokens.
        """
        self._pool = pool
        self._slots = slots
        self._decodes = _Decodes(tables, lengths, longest, scratch)

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the step's K/V of this layer, then attend every token to its context."""
        keys, values = self._pool.keys[call.layer], self._pool.values[call.layer]
        reshape_and_cache(key, value, keys, values, self._slots)
        query = query.contiguous()
        out = torch.empty_like(query)
        self._decodes.attend(call, keys, values, query, out)
        return out


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The rows of a step that decode, or would if they were not filling it up."""

    tables: Tensor
    lengths: Tensor
    longest: int
    scratch: Scratch

    def attend(
        self, call: AttentionCall, keys: Tensor, values: Tensor, query: Tensor, out: Tensor
    ) -> None:
        paged_attention(
            query,
            keys,
            values,
            self.tables,
            self.lengths,
            scale=call.scale,
            sliding_window=call.sliding_window,
            softcap=call.softcap,
            out=out,
            max_context_len=self.longest,
            scratch=self.scratch,
        )


def _widen(tables: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Pad rows to whole columns, so that every row, and every table, is aligned."""
    num_seqs, num_blocks = tables.shape
    wide = np.zeros((num_seqs, -(-num_blocks // _TABLE_COLUMNS) * _TABLE_COLUMNS), np.int32)
    wide[:, :num_blocks] = tables
    return wide
