"""Requests that move between two cores while both run: nothing lost, repeated or changed."""

from __future__ import annotations

import random

import pytest

from tests.support.core_harness import CoreHarness
from tests.support.core_random import random_config, random_request

NUM_SEEDS = 60
NUM_REQUESTS = 30


class TwoCores:
    """Two executors, of different sizes, that die, leave and come back at random."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        first = CoreHarness(random_config(rng))
        self.harnesses = [first, first.beside(random_config(rng))]
        self.prefixes = [[rng.randrange(50) for _ in range(rng.randint(1, 30))] for _ in range(3)]
        self.num_added = 0
        self.num_moves = 0

    def run(self) -> None:
        """Run until every request has ended, and check each."""
        while self.num_added < NUM_REQUESTS:
            self._transition()
        for _ in range(self.rng.randint(0, 60)):
            self._transition()
        for harness in self.harnesses:
            harness.drain()
        for harness in self.harnesses:
            harness.check_finished()
            harness.report()

    def _transition(self) -> None:
        rng = self.rng
        harness, other = rng.sample(self.harnesses, 2)
        harness.now = other.now = max(harness.now, other.now)
        dice = rng.random()
        if dice < 0.12 and self.num_added < NUM_REQUESTS:
            request_id = f"r{self.num_added}"
            self.num_added += 1
            harness.add(random_request(rng, request_id, harness.now, self.prefixes))
        elif dice < 0.14 and self.num_added:
            harness.cancel(f"r{rng.randrange(self.num_added)}")
        elif dice < 0.16 and harness.tokens:
            harness.stop(*rng.choice(sorted(harness.tokens)))
        elif dice < 0.18:
            self.num_moves += len(harness.core.state.groups)
            harness.move_to(other, died=rng.random() < 0.5)
        elif dice < 0.2:
            harness.advance(rng.choice([1, 5]))
        elif dice < 0.6:
            harness.plan()
        else:
            harness.apply()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_requests_move_between_cores(seed: int) -> None:
    """Whatever moves when, every output is the oracle's, and both pools are whole."""
    TwoCores(seed).run()


def test_something_moves() -> None:
    """The seeds above do move requests."""
    cores = [TwoCores(seed) for seed in range(5)]
    for each in cores:
        each.run()
    assert sum(each.num_moves for each in cores) > 20
