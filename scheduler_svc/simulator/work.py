"""What a step has to do, in numbers, and how long that takes: the seam to cost models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(slots=True)
class StepWork:
    """One step, counted.

    Attributes:
        num_decodes: sequences that compute their one newest token.
        decode_context: tokens that they attend to, all together.
        prefills: chunks of prompts as (first position, tokens).
        num_sampled: sequences that draw a token.
        num_swapped_blocks: blocks that cross the host link, either way.
        num_copied_blocks: blocks that are copied on the device.
    """

    num_decodes: int = 0
    decode_context: int = 0
    prefills: list[tuple[int, int]] | None = None
    num_sampled: int = 0
    num_swapped_blocks: int = 0
    num_copied_blocks: int = 0


class StepSeconds(NamedTuple):
    """How long a step takes: all of it, and the part that moved blocks."""

    forward: float
    move: float


class StepCost(Protocol):
    """A model of time."""

    def seconds(self, work: StepWork) -> StepSeconds:
        """Say how long the step takes; a function of the work alone."""


def num_pairs(prefills: list[tuple[int, int]]) -> float:
    """Query-key pairs that causal attention of these chunks computes."""
    return sum(count * (first + (count + 1) / 2) for first, count in prefills)
