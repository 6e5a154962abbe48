"""What memory a scheduler takes, and keeps, over very many requests.

    python -P tests/bench/scheduler_memory.py --requests 100000

The real service, from its public API to the wire of plans, in a process of its own; behind
it a simulated executor, which computes nothing and so answers as fast as it is asked.
Prompts differ, so the prefix cache turns over all the time; every tenth request is cancelled
in the middle. Prints the scheduler's resident memory as it goes, the peak, and by how much
the second half grew.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from pathlib import Path

from octavo_client import AsyncClient

sys.path.append(str(Path(__file__).parents[2]))

from tests.support.simulated_service import SimulatedService, simulated_service

_AT_ONCE = 64
_STEPS_PER_SECOND = 400
_NUM_OUTPUT_TOKENS = 4


async def drive(client: AsyncClient, numbers: itertools.count[int], last: int) -> None:
    """Send requests one after the other until the number is reached."""
    while (number := next(numbers)) < last:
        rng = random.Random(number)
        prompt = [rng.randrange(1000, 40_000) for _ in range(rng.randint(4, 60))]
        stream = client.stream(
            tokens=prompt, max_tokens=_NUM_OUTPUT_TOKENS, ignore_eos=True, temperature=0.0
        )
        async for _ in stream:
            if number % 10 == 0:
                stream.cancel()
                break


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Run all of it; returns the figures."""
    started = simulated_service(model=options.model, steps_per_second=_STEPS_PER_SECOND)
    async with started as service, AsyncClient(service.target) as client:
        return await _drive_all(options, client, service)


async def _drive_all(
    options: argparse.Namespace, client: AsyncClient, service: SimulatedService
) -> dict[str, object]:
    numbers = itertools.count()
    part = -(-options.requests // options.parts)
    samples: list[tuple[int, float]] = [(0, service.memory_mib()["VmRSS"])]
    begin = time.monotonic()
    sys.stderr.write("  requests  requests/s  scheduler MiB\n")
    for last in range(part, part * options.parts + 1, part):
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(drive(client, numbers, last))
        numbers = itertools.count(last)
        resident = service.memory_mib()["VmRSS"]
        samples.append((last, resident))
        rate = last / (time.monotonic() - begin)
        sys.stderr.write(f"{last:10,}  {rate:10,.0f}  {resident:13.1f}\n")
    (left,) = (await client.snapshot()).executors
    middle = samples[len(samples) // 2][1]
    return {
        "requests": samples[-1][0],
        "mib_at": samples,
        "peak_mib": service.memory_mib()["VmHWM"],
        "growth_of_second_half_mib": samples[-1][1] - middle,
        "requests_left": left.num_running + left.num_queued,
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description="Measure a scheduler's memory.")
    add = parser.add_argument
    add("--requests", type=int, default=100_000, metavar="N", help="in all [100000]")
    add("--parts", type=int, default=10, metavar="N", help="times to look at the memory [10]")
    add("--model", default="smollm2-135m-instruct", metavar="NAME", help="as of the scheduler")
    options = parser.parse_args()
    found = asyncio.run(measure(options))
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
