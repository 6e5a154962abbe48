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
import tempfile
import time
from pathlib import Path

from octavo_client import AsyncClient
from octavo_client._process import Child
from octavo_client._socket import settle_address

_AT_ONCE = 64
_CONNECT_SECONDS = 30.0
_STEPS_PER_SECOND = 400
_NUM_OUTPUT_TOKENS = 4
_EXECUTOR = {
    "model": "simulated",
    "block_size": 16,
    "num_device_blocks": 2048,
    "max_model_len": 2048,
    "max_num_batched_tokens": 8192,
    "max_num_rows": 128,
    "vocab_size": 49_152,
}
_MIB = 1024


def memory_mib(pid: int) -> dict[str, float]:
    """Resident memory of a process now, and at most so far, in MiB."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) / _MIB
    return found


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


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Run all of it; returns the figures."""
    executor = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "scheduler_svc.bench_executors", json.dumps(_EXECUTOR), "1"),
        str(_STEPS_PER_SECOND),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert executor.stdout is not None
    (executor_address,) = json.loads(await executor.stdout.readline())
    address = settle_address("127.0.0.1:0", "--listen")
    scheduler = Child("scheduler", folder / "scheduler.log", echo=False)
    flags = ["--model", options.model, "--listen", address, "--executors", executor_address]
    try:
        await scheduler.start("scheduler_svc", flags)
        pid = scheduler.pid
        async with AsyncClient(f"grpc://{address}") as client:
            return await _drive_all(options, client, pid)
    finally:
        await scheduler.stop(10.0)
        executor.terminate()
        await executor.wait()


async def _drive_all(
    options: argparse.Namespace, client: AsyncClient, pid: int
) -> dict[str, object]:
    async with asyncio.timeout(_CONNECT_SECONDS):
        while not any(executor.connected for executor in (await client.snapshot()).executors):
            await asyncio.sleep(0.1)
    numbers = itertools.count()
    part = -(-options.requests // options.parts)
    samples: list[tuple[int, float]] = [(0, memory_mib(pid)["VmRSS"])]
    begin = time.monotonic()
    sys.stderr.write("  requests  requests/s  scheduler MiB\n")
    for last in range(part, part * options.parts + 1, part):
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(drive(client, numbers, last))
        numbers = itertools.count(last)
        resident = memory_mib(pid)["VmRSS"]
        samples.append((last, resident))
        rate = last / (time.monotonic() - begin)
        sys.stderr.write(f"{last:10,}  {rate:10,.0f}  {resident:13.1f}\n")
    (left,) = (await client.snapshot()).executors
    middle = samples[len(samples) // 2][1]
    return {
        "requests": samples[-1][0],
        "mib_at": samples,
        "peak_mib": memory_mib(pid)["VmHWM"],
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
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
