"""The whole core under seeded random driving: many transitions, quickly."""

from __future__ import annotations

import os

import pytest

from tests.support.core_harness import TOTALS
from tests.support.core_random import RandomDriver

_TRANSITIONS = int(os.environ.get("OCTAVO_TRANSITIONS", "100000"))
_PARTS = 10


@pytest.mark.parametrize("part", range(_PARTS))
def test_any_course_of_events_keeps_the_invariants_and_the_outputs(part: int) -> None:
    """Whatever comes, goes, fails or is pushed out, in any order and under every policy,
    every request gets the tokens of the oracle and the pool ends as it began.
    """
    _drive(first_seed=part * 1_000_000, num_transitions=_TRANSITIONS // _PARTS)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_million_transitions() -> None:
    """The same for other seeds, and longer; OCTAVO_TRANSITIONS sets how long."""
    _drive(first_seed=1 << 40, num_transitions=max(1_000_000, _TRANSITIONS))


def test_driving_reaches_every_kind_of_event() -> None:
    """The random driver preempts in both ways, copies, hits the cache, discards tokens
    and loses executors: else passing it would mean little.
    """
    before = dict(TOTALS.counters)
    _drive(first_seed=7_000_000, num_transitions=8_000)
    reached = {name: value - before.get(name, 0) for name, value in TOTALS.counters.items()}
    for name in (
        "num_recompute_preemptions",
        "num_swap_preemptions",
        "num_copied_blocks",
        "num_prefix_hit_tokens",
        "num_cancelled",
        "num_discarded_tokens",
        "num_resyncs",
    ):
        assert reached[name] > 0, name


def _drive(*, first_seed: int, num_transitions: int) -> None:
    seed = first_seed
    while num_transitions > 0:
        driver = RandomDriver(seed)
        try:
            num_transitions -= driver.run()
        except Exception as error:
            error.add_note(f"RandomDriver({seed}) after {driver.harness.num_transitions}")
            raise
        seed += 1
