"""Half an hour near saturation: does anything grow, leak or slow down?

    python -P tests/bench/soak.py --rate 1.0 --seconds 1800

Both services, real ones, with the KV sanitizer if `--kv-check` is given. Requests come at random
at `--rate` a second (0.9 of what the system can serve is the test that is meant); a tenth of them
is cancelled at a random token. Printed, for the first and the last third of the time: TTFT and the
time of an output token; resident memory of both processes by thirds; and whether the pool is whole
at the end. Exit code 1 if it is not, or if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from octavo_client import NO_RETRIES, AsyncClient, Delta, OctavoError
from octavo_client._local import LocalOptions, LocalStack
from octavo_client.bench.measure import percentile
from octavo_client.bench.workload import Request, cap_lengths, draw_sharegpt, poisson_arrivals

_THIRDS = 3
_SAMPLE_SECONDS = 5.0
_CANCELLED_SHARE = 0.1


@dataclass
class Seen:
    """What was seen, with the seconds at which it began."""

    ttft: list[tuple[float, float]] = field(default_factory=list)
    per_token: list[tuple[float, float]] = field(default_factory=list)
    rss_mib: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    num_done: int = 0
    num_cancelled: int = 0
    failures: list[str] = field(default_factory=list)


def by_thirds(samples: list[tuple[float, float]], seconds: float, percent: float) -> list[float]:
    """A percentile of each third of the time."""
    found = []
    for third in range(_THIRDS):
        begin, end = third * seconds / _THIRDS, (third + 1) * seconds / _THIRDS
        values = [value for at, value in samples if begin <= at < end]
        found.append(round(percentile(values, percent), 4) if values else float("nan"))
    return found


async def send(client: AsyncClient, request: Request, last: int | None, seen: Seen) -> None:
    """Send one request at its time; cancel it at its token number `last`, if that is given."""
    begin, times = time.perf_counter(), []
    try:
        stream = client.stream(
            tokens=request.prompt,
            max_tokens=request.num_output_tokens,
            temperature=0,
            ignore_eos=True,
        )
        async with stream:
            async for event in stream:
                if isinstance(event, Delta) and event.token_ids:
                    times.append(time.perf_counter())
                    if last is not None and len(times) >= last:
                        break
    except OctavoError as error:
        seen.failures.append(f"{type(error).__name__}: {error}")
        return
    if last is not None:
        seen.num_cancelled += 1
    else:
        seen.num_done += 1
    at = request.arrival_seconds
    seen.ttft.append((at, times[0] - begin))
    if len(times) > 1:
        seen.per_token.append((at, (times[-1] - times[0]) / (len(times) - 1)))


async def watch_memory(stack: LocalStack, seen: Seen, begin: float) -> None:
    """Note the resident memory of both services every few seconds, until cancelled."""
    while True:
        for name in ("scheduler", "executor"):
            status = Path(f"/proc/{stack.pid(name)}/status").read_text(encoding="ascii")
            line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
            sample = (time.perf_counter() - begin, int(line.split()[1]) / 1024)
            seen.rss_mib.setdefault(name, []).append(sample)
        await asyncio.sleep(_SAMPLE_SECONDS)


async def soak(options: argparse.Namespace) -> dict[str, object]:
    """Start both services, keep them busy, stop them; gives the figures."""
    rng = random.Random(options.seed)
    count = round(options.rate * options.seconds)
    drawn = draw_sharegpt(num_requests=count, vocab_size=30_000, seed=options.seed)
    drawn = cap_lengths(drawn, max_prompt=options.max_prompt, max_output=options.max_output)
    requests = poisson_arrivals(drawn, options.rate, seed=options.seed)
    flags = ("--kv-check",) if options.kv_check else ()
    local = LocalOptions(
        model=options.model, listen="127.0.0.1:0", dtype=options.dtype, executor_args=flags
    )
    seen = Seen()
    async with LocalStack(local) as stack, AsyncClient(stack.target, retry=NO_RETRIES) as client:
        await client.generate("to warm up", max_tokens=8)
        begin = time.perf_counter()
        watching = asyncio.create_task(watch_memory(stack, seen, begin))
        async with asyncio.TaskGroup() as group:
            for request in requests:
                late = begin + request.arrival_seconds - time.perf_counter()
                await asyncio.sleep(max(0.0, late))
                is_cancelled = rng.random() < _CANCELLED_SHARE
                last = rng.randint(1, request.num_output_tokens) if is_cancelled else None
                group.create_task(send(client, request, last, seen))
        watching.cancel()
        await asyncio.sleep(1.0)
        (executor,) = (await client.snapshot()).executors
    seconds = options.seconds
    return {
        "requests": {"done": seen.num_done, "cancelled": seen.num_cancelled},
        "failures": seen.failures,
        "held_blocks": executor.pool.num_referenced,
        "live_requests": executor.num_running + executor.num_queued + executor.num_preempted,
        "preemptions": executor.counters.num_recompute_preemptions
        + executor.counters.num_swap_preemptions,
        "by_thirds": {
            "ttft_p50": by_thirds(seen.ttft, seconds, 50),
            "ttft_p99": by_thirds(seen.ttft, seconds, 99),
            "per_token_p50": by_thirds(seen.per_token, seconds, 50),
            "per_token_p99": by_thirds(seen.per_token, seconds, 99),
            "rss_mib_p50": {n: by_thirds(s, seconds, 50) for n, s in seen.rss_mib.items()},
            "rss_mib_max": {n: by_thirds(s, seconds, 100) for n, s in seen.rss_mib.items()},
        },
    }


def main() -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=float, required=True, help="requests a second")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--max-prompt", type=int, default=256)
    parser.add_argument("--max-output", type=int, default=64)
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-check", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    figures = asyncio.run(soak(parser.parse_args()))
    json.dump(figures, sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 1 if figures["failures"] or figures["held_blocks"] or figures["live_requests"] else 0


if __name__ == "__main__":
    sys.exit(main())
