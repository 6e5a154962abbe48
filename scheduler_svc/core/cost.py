"""What preempting by recompute and by swap would cost, from measured rates.

    recompute = tokens / prefill rate            swap = 2 * blocks * bytes / bandwidth

Rates are exponential moving averages over the steps' own timings; until both have been
measured the model prefers to recompute, which needs no memory on the host. A prefilled token
costs what it adds to a step: what the decodes beside it take, as steps of decodes alone
show, would be spent anyway.
Source: Kwon et al. (2023), sections 4.5 and 7.3.
"""

from __future__ import annotations

from scheduler_svc.core.step import StepTimings

_KEEP = 0.8
_LEAST_ADDED = 0.1
"""Of a step that mostly prefills, at least this share is for that: times vary."""


class CostModel:
    """Measured seconds per prefilled token and per moved block."""

    def __init__(self) -> None:
        """Start without measurements."""
        self.prefill_ns_per_token: float | None = None
        self.move_ns_per_block: float | None = None
        self._decode_ns_per_step: float | None = None

    def observe(
        self,
        timings: StepTimings,
        *,
        num_prefilled: int = 0,
        num_decodes: int = 0,
        num_moved_blocks: int = 0,
    ) -> None:
        """Learn from one step.

        Args:
            timings: of the step.
            num_prefilled: tokens that it prefilled. Of a step that mostly decodes they say
                little.
            num_decodes: sequences that it decoded.
            num_moved_blocks: blocks that it swapped, either way.
        """
        compute_ns = timings.forward_ns - timings.move_ns
        if compute_ns > 0 and num_decodes and not num_prefilled:
            self._decode_ns_per_step = _blend(self._decode_ns_per_step, compute_ns)
        elif compute_ns > 0 and num_prefilled and num_prefilled >= num_decodes:
            beside = (self._decode_ns_per_step or 0.0) if num_decodes else 0.0
            added_ns = max(compute_ns - beside, _LEAST_ADDED * compute_ns)
            self.prefill_ns_per_token = _blend(self.prefill_ns_per_token, added_ns / num_prefilled)
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
