"""What the paper compares with: static batching and Orca, on the same step times.

Source of the definitions: Kwon et al. (2023), sections 3.1 and 6.1.

**Static** (FasterTransformer with dynamic batching): as many requests as are waiting and fit, with
the longest length reserved for each, form a batch; prompts are padded to the longest of them,
and nobody is answered or admitted before the longest output is done.

**Orca**: in every iteration those who are done leave and the next in line enter, first come first
served, with their whole prompts in one iteration beside the decodes. K/V are contiguous, so
room for all tokens is reserved at admission, from a buddy allocator:

    oracle   for the true length of the output, which no real system knows
    pow2     for the next power of two of it, at most twice too much
    max      for the longest sequence that the model allows

Samples and beams of one request share nothing. In the baselines' favour, a prompt is computed
once for all of its samples, K/V are read without the cost of blocks, and copies between beams
are free unless `BaselineConfig.beam_copy_share` says how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from scheduler_svc.simulator.baseline import BaselineConfig
from scheduler_svc.simulator.orca import Orca
from scheduler_svc.simulator.report import Report
from scheduler_svc.simulator.static_batching import StaticBatching
from scheduler_svc.simulator.workload import SimRequest

__all__ = ["BaselineConfig", "simulate_orca", "simulate_static"]


def simulate_orca(
    config: BaselineConfig,
    requests: Iterable[SimRequest],
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Serve all requests as Orca would; `config.reserve` says what it knows of lengths.

    Raises:  WorkloadError: if arrivals are not in order.
    """
    return Orca(config, requests, progress).run()


def simulate_static(
    config: BaselineConfig,
    requests: Iterable[SimRequest],
    progress: Callable[[int], None] | None = None,
) -> Report:
    """Serve all requests in static batches.

    Raises:  WorkloadError: if arrivals are not in order.
    """
    return StaticBatching(replace(config, reserve="max"), requests, progress).run()
