"""Random configurations, requests and transitions for the scheduler core.

Small on purpose: tiny pools force preemption, tiny blocks force borders, a small
vocabulary forces shared prefixes and early ends.
"""

from __future__ import annotations

import random

from scheduler_svc.core.request import BeamParams, Request, SamplingParams
from scheduler_svc.core.state import CoreConfig
from tests.support.core_harness import CoreHarness

_GREEDY = SamplingParams()


def random_config(rng: random.Random) -> CoreConfig:
    """Draw limits and policies."""
    max_num_seqs = rng.randint(4, 9)
    block_size = rng.choice([1, 2, 4, 8])
    return CoreConfig(
        num_blocks=rng.randint(40, 160) // block_size + 3,
        block_size=block_size,
        num_host_blocks=rng.choice([0, 20, 80, 200]) // block_size,
        max_num_batched_tokens=max_num_seqs + rng.randint(1, 30),
        max_num_seqs=max_num_seqs,
        max_queue=rng.choice([3, 50]),
        watermark=rng.choice([0.0, 0.01, 0.1]),
        max_steps_in_flight=rng.randint(1, 3),
        preemption=rng.choice(["recompute", "swap", "swap", "auto"]),
        policy=rng.choice(["fcfs", "priority", "fair"]),
        prefix_cache=rng.random() < 0.7,
    )


def random_request(
    rng: random.Random, request_id: str, now: float, prefixes: list[list[int]]
) -> Request:
    """Draw a request; its prompt often begins as others do."""
    prompt = [*rng.choice(prefixes), *(rng.randrange(50) for _ in range(rng.randint(0, 12)))]
    stops = frozenset(rng.sample(range(50), rng.randint(1, 3))) if rng.random() < 0.5 else ()
    max_tokens = rng.choice([1, 2, rng.randint(3, 20)])
    common = {
        "request_id": request_id,
        "prompt_tokens": prompt,
        "sampling": _GREEDY,
        "stop_token_ids": frozenset(stops),
        "priority": rng.choice([0, 0, 0, 1, 2]),
        "tenant": rng.choice(["", "a", "b"]),
        "cache_salt": rng.choice(["", "", "s"]),
        "use_cache": rng.random() < 0.8,
        "arrival": now,
        "deadline": now + rng.randint(1, 60) if rng.random() < 0.1 else None,
    }
    if rng.random() < 0.2:
        width = rng.randint(2, 4)
        beam = BeamParams(width, rng.choice([0.0, 0.5, 1.0, 2.0, -1.0]), rng.random() < 0.5)
        n = rng.randint(1, width)
        return Request(**common, max_tokens=max_tokens, n=n, best_of=n, beam=beam)
    best_of = rng.choice([1, 1, 1, 2, 4])
    if rng.random() < 0.1:
        return Request(**common, max_tokens=0, n=best_of, best_of=best_of, num_prompt_logprobs=0)
    resumed = {}
    if rng.random() < 0.2:
        for index in rng.sample(range(best_of), rng.randint(1, best_of)):
            count = rng.randint(0, min(3, max_tokens))
            resumed[index] = tuple(rng.randrange(50) for _ in range(count))
            resumed[index] = _cut_at_stop(resumed[index], common["stop_token_ids"])
    return Request(
        **common,
        max_tokens=max_tokens,
        n=best_of,
        best_of=best_of,
        resumed=resumed,
        num_logprobs=2 if rng.random() < 0.2 else None,
        num_prompt_logprobs=0 if rng.random() < 0.15 else None,
    )


def _cut_at_stop(tokens: tuple[int, ...], stops: frozenset[int]) -> tuple[int, ...]:
    """A client's tokens of one choice hold a stop token at most at their end."""
    for position, token in enumerate(tokens):
        if token in stops:
            return tokens[: position + 1]
    return tokens


class RandomDriver:
    """Drives one harness from a seed until its requests are done."""

    def __init__(self, seed: int, num_requests: int = 25) -> None:
        self.rng = rng = random.Random(seed)
        self.harness = CoreHarness(random_config(rng))
        self.harness.model.ns_per_block = rng.choice([100, 2000, 100_000])
        self.num_requests = num_requests
        self.num_added = 0
        self.prefixes = [[rng.randrange(50) for _ in range(rng.randint(1, 30))] for _ in range(3)]
        self.failure_rate = rng.choice([0.0, 0.0, 0.02])

    def run(self) -> int:
        """Run to the end and check everything; returns the number of transitions."""
        harness = self.harness
        while self.num_added < self.num_requests:
            self._transition()
        for _ in range(self.rng.randint(0, 60)):
            self._transition()
        harness.drain()
        harness.check_finished()
        harness.report()
        return harness.num_transitions

    def _transition(self) -> None:
        rng, harness = self.rng, self.harness
        dice = rng.random()
        if rng.random() < 0.3:
            harness.advance(rng.choice([0, 0, 1, 5]))
        if rng.random() < 0.3:
            harness.core.name_blocks()
        if dice < 0.12 and self.num_added < self.num_requests:
            request_id = f"r{self.num_added}"
            self.num_added += 1
            harness.add(random_request(rng, request_id, harness.now, self.prefixes))
        elif dice < 0.14 and self.num_added:
            harness.cancel(f"r{rng.randrange(self.num_added + 1)}")
        elif dice < 0.16 and harness.tokens:
            harness.stop(*rng.choice(sorted(harness.tokens)))
        elif dice < 0.60:
            harness.plan()
        elif dice < 0.60 + self.failure_rate:
            rng.choice([harness.fail, harness.restart, harness.die])()
        else:
            harness.apply()
