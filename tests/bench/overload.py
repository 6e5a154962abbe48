"""What ten times too many requests do to those that are accepted (W6).

    python -P tests/bench/overload.py --rate 1.2 --max-queue-seconds 1

Both services, real ones. Requests come at random: for `--seconds` at the rate that the system
can just serve (`--rate`, requests a second), then ten times as many, then half. Printed, for
each part: TTFT, mean time of an output token, and whole latency of the accepted requests, how
long a refusal took, and after the overload how soon requests are answered as fast as before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from octavo_client._local import LocalOptions, LocalStack
from octavo_client.bench.measure import Record, percentile
from octavo_client.bench.run import run_workload
from octavo_client.bench.targets import GrpcTarget, Sampling
from octavo_client.bench.workload import Request, draw_sharegpt, poisson_arrivals

PARTS = (("before", 1.0), ("overload", 10.0), ("after", 0.5))
_SLACK = 1.2
_SHORTER = 8


def arrivals(rate: float, seconds: float, seed: int) -> list[tuple[str, Request]]:
    """Draw every part's requests, one part after the other."""
    requests = []
    for number, (part, factor) in enumerate(PARTS):
        count = round(rate * factor * seconds)
        drawn = draw_sharegpt(num_requests=count, vocab_size=30_000, seed=seed + number)
        drawn = [_shortened(request) for request in drawn]
        for request in poisson_arrivals(drawn, rate * factor, seed=seed + number):
            at = min(request.arrival_seconds, seconds) + number * seconds
            requests.append((part, replace(request, id=f"{part}-{request.id}", arrival_seconds=at)))
    return requests


def _shortened(request: Request) -> Request:
    """An eighth of everything: on two cores the whole would take minutes."""
    return replace(
        request,
        prompt=request.prompt[: max(1, len(request.prompt) // _SHORTER)],
        num_output_tokens=max(1, request.num_output_tokens // _SHORTER),
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and count."""
    if not values:
        return {"count": 0}
    return {
        "p50": percentile(values, 50),
        "p99": percentile(values, 99),
        "max": max(values),
        "count": len(values),
    }


def accepted(records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Figures of the requests that were served, in seconds."""
    done = [record for record in records if not record.error]
    return {
        "ttft": spread([record.ttft for record in done]),
        "per_token": spread([record.e2e / record.num_received for record in done]),
        "latency": spread([record.e2e for record in done]),
    }


def recovery(records: Sequence[Record], end: float, good: float) -> float | None:
    """Seconds after the overload from which on every TTFT was at most `good`."""
    late = [r.request.arrival_seconds for r in records if r.error or r.ttft > good]
    return max([0.0, *(at - end for at in late)]) if records else None


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Start both services, send everything, stop them; gives the figures."""
    local = LocalOptions(
        model=options.model,
        listen="127.0.0.1:0",
        dtype=options.dtype,
        max_num_rows=options.rows,
        scheduler_args=(f"--max-queue-seconds={options.max_queue_seconds}",),
    )
    drawn = arrivals(options.rate, options.seconds, options.seed)
    async with LocalStack(local) as stack, GrpcTarget(stack.target, Sampling()) as target:
        warm = [replace(r, arrival_seconds=0.0) for part, r in drawn if part == "before"][:8]
        await run_workload(target, warm)
        run = await run_workload(target, [request for _, request in drawn])
    parts: dict[str, list[Record]] = {name: [] for name, _ in PARTS}
    for (part, _), record in zip(drawn, run.records, strict=True):
        parts[part].append(record)
    figures: dict[str, object] = {part: accepted(records) for part, records in parts.items()}
    refused = [r for records in parts.values() for r in records if r.error]
    figures["refused"] = spread([r.ended_at - r.sent_at for r in refused])
    figures["refused_otherwise"] = sum("Overloaded" not in (r.error or "") for r in refused)
    before = accepted(parts["before"])["ttft"]["p99"]
    figures["recovery_seconds"] = recovery(parts["after"], 2 * options.seconds, _SLACK * before)
    return figures


def main() -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", type=float, required=True, help="requests/s just served")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part")
    parser.add_argument("--max-queue-seconds", type=float, default=1.0)
    parser.add_argument("--rows", type=int, default=16, help="sequences that run at once")
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    figures = asyncio.run(measure(parser.parse_args()))
    json.dump(figures, sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))
    sys.exit(main())
