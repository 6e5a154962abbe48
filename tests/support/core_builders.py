"""Short ways to say what a unit test of the core needs."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.request import Request, SamplingParams
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.state import CoreConfig
from tests.support.core_harness import CoreHarness


def make_config(**changes: object) -> CoreConfig:
    """A pool with room for everything, unless a test says otherwise."""
    defaults = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_steps_in_flight": 1,
        "watermark": 0.0,
    }
    return CoreConfig(**{**defaults, **changes})


def make_request(name: str = "r", prompt: int | list[int] = 4, **changes: object) -> Request:
    """A request; a prompt given as a length is made of tokens that no other name has."""
    if isinstance(prompt, int):
        first = 1000 * (1 + sum(map(ord, name)))
        prompt = list(range(first, first + prompt))
    values = {"max_tokens": 8, **changes}
    if "best_of" in values:
        values.setdefault("n", values["best_of"])
    return Request(name, prompt, SamplingParams(), **values)


def make_group(name: str = "r", prompt: int | list[int] = 4, **changes: object) -> SequenceGroup:
    """A group outside any scheduler."""
    serial = changes.pop("serial", 1)
    group = SequenceGroup(make_request(name, prompt, **changes))
    group.serial = group.lineage = serial
    group.key = (0, group.request.arrival, serial)
    return group


def make_sequence(prompt: int | list[int] = 4, **changes: object) -> Sequence:
    """The first sequence of such a group."""
    return make_group("r", prompt, **changes).sequences[0]


def make_harness(**changes: object) -> CoreHarness:
    """A core with the modelled executor."""
    return CoreHarness(make_config(**changes))


def finish(harness: CoreHarness) -> None:
    """Run everything to its end and compare every output with the oracle."""
    harness.drain()
    harness.check_finished()


def step_until(harness: CoreHarness, reached: Callable[[], object], limit: int = 100) -> None:
    """Step until something holds; it is an error if it never does."""
    for _ in range(limit):
        if reached():
            return
        harness.step()
    raise AssertionError(f"not reached in {limit} steps")
