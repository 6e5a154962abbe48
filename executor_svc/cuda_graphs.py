"""Decode steps from CUDA graphs: one launch in place of the some ten of every layer.

A step of decodes alone is short work for a GPU, shorter often than Python needs to launch
it. So the forward pass, paged attention included, is recorded once for each of some batch
sizes, and replayed over buffers that stay where they are. A batch between two sizes is
filled up with rows of context 0 and slot -1, which attend to nothing and write nothing.

All graphs are recorded when the executor starts: no stream waits for one later, memory
that is missing is missed before there is work, and the smaller graphs live in the memory
of the largest, which comes first.

One graph of a size serves every context length. Into how many parts decode cuts contexts
is fixed in it, for the longest that the model has: where sequences fill the GPU that is
one part whatever their length, and where they do not, parts that find no token left end
at once, so that short contexts pay for one small merge a layer. Graphs for several lengths
would save that, for as many times the memory and the start-up.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from octavo_kernels.triton_ops.splits import Scratch
from torch import Tensor

from executor_svc.batch import StepBatch
from executor_svc.capture_guard import CaptureGuard
from executor_svc.drawn import Feed
from executor_svc.logs import get_logger
from executor_svc.model_loader import LoadedModel, forward
from executor_svc.pool import KvPool
from executor_svc.rows import Limits
from executor_svc.tensor_parallel.ranks import one_line
from executor_svc.transfer import send
from executor_svc.triton_attention import DecodeStep

_log = get_logger(__name__)

# Larger batches keep a GPU busy for longer than their launches take.
_BATCH_SIZES: tuple[int, ...] = (
    1,
    2,
    4,
    *range(8, 64, 8),
    *range(64, 256, 16),
    *range(256, 513, 32),
)
_MIB = 1 << 20

Run = Callable[[], object]
"""Launches work, the same in every call."""


class Recorder(Protocol):
    """Turns launches into something that repeats them all at once."""

    def rehearse(self, run: Run) -> None:
        """Run it where it will be recorded, so that nothing is loaded or compiled then."""

    def record(self, run: Run) -> Run:
        """Record it; the result repeats it on the tensors that it used."""

    def free_bytes(self) -> int:
        """Memory of the device that nobody has."""

    def release(self) -> None:
        """Give memory back to the device that nothing uses any more."""


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory.

    Since they do, graphs are replayed one after the other, and what one leaves in the pool
    is lost with the next.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped there
        self._pool = torch.cuda.graph_pool_handle()

    def rehearse(self, run: Run) -> None:
        """See `Recorder`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)

    def record(self, run: Run) -> Run:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        # What other threads ask of CUDA meanwhile is not about the graph.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        return graph.replay

    def free_bytes(self) -> int:
        """See `Recorder`."""
        return torch.cuda.mem_get_info(self._device)[0]

    def release(self) -> None:
        """See `Recorder`."""
        torch.cuda.empty_cache()


class DecodeGraphs:
    """Recorded decode steps of one model over one pool.

    Invariant: graphs read and write buffers that are allocated before any is recorded and
    never again, and rows past the current batch write to no block.
    """

    @torch.inference_mode()
    def __init__(
        self, loaded: LoadedModel, pool: KvPool, limits: Limits, recorder: Recorder
    ) -> None:
        """Record a graph for each batch size up to the largest step of decodes.

        Raises:
            NotCapturable: if the model does what a graph cannot hold.
            RuntimeError: of torch, if memory is short or a recording fails.
        """
        largest = min(limits.max_num_rows, limits.max_num_batched_tokens, _BATCH_SIZES[-1])
        self.batch_sizes = _BATCH_SIZES[: bisect_left(_BATCH_SIZES, largest) + 1]
        self._loaded, self._pool = loaded, pool
        self._longest = limits.max_model_len
        self._scratch = Scratch(loaded.device)
        self._allocate(self.batch_sizes[-1], -(-self._longest // limits.block_size))
        largest_first = self.batch_sizes[::-1]
        with CaptureGuard(loaded.device):
            logits = self._forward(largest_first[0])
        self._logits = torch.empty_like(logits)
        # Every size before the first recording: the scratch memory has grown by then.
        for size in largest_first:
            recorder.rehearse(partial(self._compute, size))
        self._replays = {
            size: recorder.record(partial(self._compute, size)) for size in largest_first
        }

    def serves(self, batch: StepBatch) -> bool:
        """Whether the step is decodes alone, and not too many."""
        return batch.num_tokens == batch.num_decodes <= self.batch_sizes[-1]

    @torch.inference_mode()
    def forward(self, batch: StepBatch, feed: Feed | None = None) -> Tensor:
        """Compute the tokens of a batch that it serves, writing their K/V to the pool.

        Args:
            batch: the step.
            feed: its tokens that only the device knows.
        Returns: [num_decodes, vocab_size] logits, which the next call overwrites: every
            decode draws, so they are those of `batch.kept_tokens`.
        """
        size = self.batch_sizes[bisect_left(self.batch_sizes, batch.num_decodes)]
        self._fill(batch, size)
        if feed is not None:
            feed.put_into(self._tokens[0])
        self._replays[size]()
        return self._logits[: batch.num_decodes]

    def _allocate(self, num_rows: int, num_columns: int) -> None:
        device = self._loaded.device
        # Token ids, positions and slots.
        self._tokens = torch.zeros((3, num_rows), dtype=torch.int64, device=device)
        self._tokens[2] = -1
        self._lengths = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros((num_rows, num_columns), dtype=torch.int32, device=device)
        self._places = torch.arange(num_rows, device=device)

    def _fill(self, batch: StepBatch, size: int) -> None:
        """Send the step in one piece, then spread it over the buffers on the device.

        Of the tables only the columns in use go out: whole ones would be megabytes a step
        where the model's longest context is long.
        """
        count = batch.num_decodes
        tokens = np.zeros((3, size), np.int64)
        tokens[2] = -1
        tokens[:, :count] = batch.token_ids, batch.positions, batch.slots
        lengths = np.zeros(size, np.int32)
        lengths[:count] = batch.context_lens
        arrays: list[npt.NDArray[np.generic]] = [tokens, lengths, batch.block_tables]
        sent_tokens, sent_lengths, sent_tables = send(arrays, self._loaded.device)
        self._tokens[:, :size].copy_(sent_tokens)
        self._lengths[:size].copy_(sent_lengths)
        self._tables[:count, : sent_tables.shape[1]].copy_(sent_tables)

    def _compute(self, size: int) -> None:
        """Leave the logits where the other graphs' memory does not lie over them."""
        self._logits[:size].copy_(self._forward(size))

    def _forward(self, size: int) -> Tensor:
        token_ids, positions, slots = self._tokens[:, :size]
        step = DecodeStep(
            self._pool,
            self._scratch,
            slots=slots,
            tables=self._tables[:size],
            lengths=self._lengths[:size],
            longest=self._longest,
        )
        return forward(self._loaded, token_ids, positions, step, self._places[:size])


def record_decodes(
    loaded: LoadedModel, pool: KvPool, limits: Limits, recorder: Recorder
) -> DecodeGraphs | None:
    """Record the decode steps, or say in one line of the log why they run without graphs."""
    recorder.release()
    began, free_bytes = time.perf_counter(), recorder.free_bytes()
    try:
        graphs = DecodeGraphs(loaded, pool, limits, recorder)
    except Exception as error:  # whatever it is, steps do without
        reason = f"{type(error).__name__}: {one_line(error)}"
    else:
        _log.info(
            "cuda_graphs_recorded",
            count=len(graphs.batch_sizes),
            seconds=round(time.perf_counter() - began, 2),
            mib=(free_bytes - recorder.free_bytes()) // _MIB,
        )
        return graphs
    # Not before the error is gone, whose traceback holds what was allocated.
    recorder.release()
    _log.warning("cuda_graphs_given_up", reason=reason)
    return None
