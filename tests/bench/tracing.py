"""What tracing costs: one workload, without and with it, in turns.

    python -P tests/bench/tracing.py --requests FILE.json --rounds 3

Two stacks of real services stand side by side, and one of them sends every span of every request
and step (nothing is sampled away) to a collector. The collector is a process of its own that
takes bytes and throws them away, on the same machine. Requests come all at once; who does not run
waits. Prints one JSON object: output tokens a second by round, and what was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
from concurrent import futures
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
from octavo_client._local import LocalOptions, LocalStack
from octavo_client.bench.run import run_workload
from octavo_client.bench.targets import GrpcTarget, Sampling
from octavo_client.bench.workload import Request, read_requests

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_WARM_UP = 8


def collect(pipe: Connection) -> None:
    """Be the collector: say the port, then, whenever asked, how many bytes came in calls."""
    seen = [0, 0]

    def export(message: bytes, _: grpc.ServicerContext) -> bytes:
        seen[0] += 1
        seen[1] += len(message)
        return b""

    handler = grpc.unary_unary_rpc_method_handler(export)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE, {"Export": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(port)
    while pipe.recv() is not None:
        pipe.send(tuple(seen))
    server.stop(None)


async def start(stack: AsyncExitStack, options: argparse.Namespace, endpoint: str) -> GrpcTarget:
    """Start services that trace to an endpoint; "": that do not trace."""
    os.environ.pop(_ENDPOINT, None)
    if endpoint:
        os.environ[_ENDPOINT] = endpoint
    local = LocalOptions(model=options.model, listen="127.0.0.1:0", dtype=options.dtype)
    services = await stack.enter_async_context(LocalStack(local))
    return await stack.enter_async_context(GrpcTarget(services.target, Sampling()))


async def turn(target: GrpcTarget, requests: list[Request]) -> float:
    """Send everything; gives output tokens a second."""
    run = await run_workload(target, requests)
    assert not any(record.error for record in run.records)
    tokens = sum(record.num_received for record in run.records)
    return tokens / max(record.ended_at for record in run.records)


async def measure(options: argparse.Namespace, pipe: Connection) -> dict[str, object]:
    """All rounds of both arms; gives the figures."""
    requests = read_requests(options.requests)
    rates: dict[str, list[float]] = {"off": [], "on": []}
    async with AsyncExitStack() as stack:
        targets = {
            "off": await start(stack, options, ""),
            "on": await start(stack, options, f"http://127.0.0.1:{pipe.recv()}"),
        }
        for target in targets.values():
            await turn(target, requests[:_WARM_UP])
        for _ in range(options.rounds):
            for name, target in targets.items():
                rates[name].append(await turn(target, requests))
                sys.stderr.write(f"{name:>4} {rates[name][-1]:8.1f} tokens/s\n")
    pipe.send("count")
    num_calls, num_bytes = pipe.recv()
    medians = {name: statistics.median(found) for name, found in rates.items()}
    return {
        "tokens_per_second": rates,
        "cost": 1 - medians["on"] / medians["off"],
        "export_calls": num_calls,
        "export_bytes": num_bytes,
    }


def main() -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    collector = multiprocessing.get_context("spawn").Process(target=collect, args=(theirs,))
    collector.start()
    try:
        figures = asyncio.run(measure(options, ours))
    finally:
        ours.send(None)
        collector.join(10)
        collector.kill()
    json.dump(figures, sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
