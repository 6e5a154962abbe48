"""What preempting by recompute and by swap would cost, from measured rates.

    recompute = tokens / prefill rate            swap = 2 * blocks * bytes / bandwidth

Rates are exponential moving averages over the steps' own timings; until both have been
measured the model prefers to recompute, which needs no memory on the host.
Source: Kwon et al. (2023), sections 4.5 and 7.3.
"""

from __future__ import annotations

from scheduler_svc.core.step import StepTimings

_KEEP = 0.8


class CostModel:
    """Measured seconds per prefilled token and per moved block."""

    def __init__(self) -> None:
        """Start without measurements."""
        self.prefill_ns_per_token: float | None = None
        self.move_ns_per_block: float | None = None

    def observe(self, timings: StepTimings, num_chunk_tokens: int, num_moved_blocks: int) -> None:
        """Learn from one step.

        Args:
            timings: of the step.
            num_chunk_tokens: tokens that it prefilled. Steps that mostly decode say
                little about the prefill rate, so the caller passes 0 for those.
            num_moved_blocks: blocks that it swapped, either way.
        """
        compute_ns = timings.forward_ns - timings.move_ns
        if num_chunk_tokens and compute_ns > 0:
            self.prefill_ns_per_token = _blend(
                self.prefill_ns_per_token, compute_ns / num_chunk_tokens
            )
        if num_moved_blocks and timings.move_ns > 0:
            self.move_ns_per_block = _blend(
                self.move_ns_per_block, timings.move_ns / num_moved_blocks
            )

    def prefers_swap(self, *, num_tokens: int, num_blocks: int) -> bool:
        """Say whether moving the blocks out and back is cheaper than computing again."""
        if self.prefill_ns_per_token is None:
            return False
        if self.move_ns_per_block is None:
            return True  # the first swap is the measurement
        recompute = self.prefill_ns_per_token * num_tokens
        return 2 * self.move_ns_per_block * num_blocks < recompute


def _blend(old: float | None, new: float) -> float:
    return new if old is None else _KEEP * old + (1 - _KEEP) * new
