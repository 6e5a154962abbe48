"""Made-up candidates are such as a model would report."""

from __future__ import annotations

import math

import pytest

from scheduler_svc.core.request import PositionLogprobs
from scheduler_svc.simulator.beams import BeamCandidates


def drawn(openness: float, seed: int = 0) -> list[PositionLogprobs]:
    candidates = BeamCandidates(openness, seed)
    found = [candidates.next(8).sampled for _ in range(2000)]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("openness", [0.0, 0.2, 1.0])
def test_candidates_are_distinct_likeliest_first_and_at_most_certain(openness: float) -> None:
    """Eight tokens whose probabilities add up to no more than 1."""
    for position in drawn(openness):
        logprobs = [each.logprob for each in position.top]
        assert position.chosen == position.top[0]
        assert len({each.token_id for each in position.top}) == 8
        assert logprobs == sorted(logprobs, reverse=True)
        assert sum(map(math.exp, logprobs)) <= 1 + 1e-9


def test_openness_is_how_often_a_step_is_open() -> None:
    """A sure step has a first choice of 0.9 and more, an open one has none."""
    found = drawn(0.3)
    share = sum(math.exp(position.chosen.logprob) < 0.9 for position in found) / len(found)
    assert share == pytest.approx(0.3, abs=0.04)


def test_equal_seeds_draw_the_same() -> None:
    """And others draw others."""
    assert drawn(0.3, seed=1) == drawn(0.3, seed=1) != drawn(0.3, seed=2)
