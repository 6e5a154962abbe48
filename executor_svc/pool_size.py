"""How many blocks there is memory for, beside the weights and a step of the largest size."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from executor_svc.config import ExecutorConfig
from executor_svc.errors import StartupError
from executor_svc.model_loader import LoadedModel, probe
from executor_svc.pool import KvShape
from executor_svc.tensor_parallel.ranks import Ranks

_GIB = 1 << 30
_PROBE_TOKENS = 2
_PLENTY = 0.25
"""A pool of at most this share of the memory needs no measured step beside it."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Blocks of the two pools."""

    num_device_blocks: int
    num_host_blocks: int


def size_pool(
    config: ExecutorConfig, loaded: LoadedModel, largest_step: int, ranks: Ranks | None = None
) -> tuple[KvShape, PoolSize]:
    """Measure a worst-case step, then divide what is left into blocks.

    Args:
        config: with what was asked for.
        loaded: the model, or this rank's share of it.
        largest_step: in tokens.
        ranks: those that share the pool: each gets as many blocks as the one with least room.

    Raises:
        StartupError: if not one block fits.
        DeviceLost: if another rank is gone.
    """
    sharers = 1 if ranks is None else ranks.place.size
    if config.num_blocks:
        shape = probe(loaded, _PROBE_TOKENS)
        num_blocks = config.num_blocks
    else:
        shape, budget = _profile(config, loaded, largest_step, ranks)
        num_blocks = int(budget // shape.block_bytes(config.block_size))
        if ranks is not None:
            num_blocks = ranks.least(num_blocks)
    if num_blocks < 1:
        raise StartupError(
            "no memory is left for a KV block; lower --max-num-batched-tokens or raise "
            "--memory-utilization"
        )
    host_blocks = config.num_host_blocks
    if host_blocks is None:
        host_bytes = config.host_cache_gib * _GIB / sharers
        host_blocks = int(host_bytes // shape.block_bytes(config.block_size))
    return shape, PoolSize(num_blocks, host_blocks)


def _profile(
    config: ExecutorConfig, loaded: LoadedModel, largest_step: int, ranks: Ranks | None
) -> tuple[KvShape, float]:
    """K/V shape, and bytes that the pool may take beside a step of the largest size.

    Ranks on one machine share its memory, and all must run the same steps.
    """
    if loaded.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(loaded.device)
        before = torch.cuda.memory_allocated(loaded.device)
        shape = probe(loaded, largest_step)
        step_bytes = torch.cuda.max_memory_allocated(loaded.device) - before
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info(loaded.device)[0]
        return shape, (free_bytes - step_bytes) * config.memory_utilization
    size, local_size = (1, 1) if ranks is None else (ranks.place.size, ranks.place.local_size)
    wanted = config.kv_cache_gib * _GIB / size
    available = _available_bytes() / local_size
    is_plenty = wanted < available * config.memory_utilization * _PLENTY
    if ranks is not None:
        is_plenty = bool(ranks.least(is_plenty))
    if is_plenty:
        # On a CPU the measurement is seconds of start-up, and would not change the answer.
        return probe(loaded, _PROBE_TOKENS), wanted
    before = _peak_rss_bytes()
    shape = probe(loaded, largest_step)
    step_bytes = _peak_rss_bytes() - before
    left = (_available_bytes() / local_size - step_bytes) * config.memory_utilization
    return shape, min(left, wanted)


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _available_bytes() -> float:
    """Memory that can be had without swapping; without /proc nothing is known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return float("inf")
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return float("inf")
