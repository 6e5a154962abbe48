"""Made-up candidates of beam search: which beams live is decided by drawn log-probabilities.

Language models are sure of most tokens and open about some. A step of a beam is open with a
given probability (`openness`); then its likeliest token has 0.2 to 0.6 of the probability and
the others fall off slowly, and otherwise it has 0.90 to 0.999. The more often steps are open,
the more often a beam's second choice beats another beam's first, so that the other ends and
the beams have a younger common ancestor: openness sets how much they share. `FITTED_OPENNESS`
is fitted to the paper's figures for Alpaca (docs/simulator.md); the search itself is the core's.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache

from scheduler_svc.core.request import PositionLogprobs, TokenLogprob
from scheduler_svc.core.step import RowLogprobs
from scheduler_svc.simulator.workload import FIRST_OF_OUTPUT

FITTED_OPENNESS = 0.2
_TABLE_SIZE = 4096
_TABLE_SEED = 0xBEA
_BEAM_TOKENS = FIRST_OF_OUTPUT + (1 << 29)


class BeamCandidates:
    """Draws from a table of candidate lists, made once for all: the draws are many."""

    def __init__(self, openness: float, seed: int) -> None:
        """Seed the draws.

        Args:
            openness: probability that a step is open, from 0 to 1.
            seed: equal seeds give equal draws.
        """
        self._openness = openness
        self._draw = random.Random(seed)

    def next(self, num_candidates: int) -> RowLogprobs:
        """Draw what one beam reports of one step."""
        table = _table(self._openness, num_candidates)
        return table[int(self._draw.random() * _TABLE_SIZE)]


@lru_cache(maxsize=32)
def _table(openness: float, num_candidates: int) -> list[RowLogprobs]:
    draw = random.Random(_TABLE_SEED)
    return [_candidates(draw, openness, num_candidates, index) for index in range(_TABLE_SIZE)]


def _candidates(
    draw: random.Random, openness: float, num_candidates: int, index: int
) -> RowLogprobs:
    is_open = draw.random() < openness
    first = draw.uniform(0.2, 0.6) if is_open else draw.uniform(0.90, 0.999)
    ratio = draw.uniform(0.5, 0.9) if is_open else draw.uniform(0.3, 0.7)
    rest = (1 - first) * (1 - ratio)
    probabilities = [first, *(rest * ratio**k for k in range(num_candidates - 1))]
    probabilities.sort(reverse=True)
    top = tuple(
        TokenLogprob(_BEAM_TOKENS + index * num_candidates + k, math.log(p))
        for k, p in enumerate(probabilities)
    )
    return RowLogprobs(PositionLogprobs(top[0], top))
