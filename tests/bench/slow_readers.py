"""What slow readers do to everybody else, and to the scheduler's memory.

    python -P tests/bench/slow_readers.py --streams 500 --slow 50 --rounds 3

The real scheduler, a process of its own, before a simulated executor. Arm "none slow": all
streams are read as they come. Arm "some slow": so many of them are read once in `--pause`
seconds, over connections of their own with the smallest buffers, so that what they do not read
stays at the scheduler. In turn, A B A B. Prints, for the streams that are read as they come, the
time between two messages (ITL), and the scheduler's resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from octavo.v1 import inference_pb2
from octavo_client import AsyncClient

sys.path.append(str(Path(__file__).parents[2]))

from tests.support.simulated_service import SimulatedService, simulated_service

_GENERATE = "/octavo.v1.InferenceService/Generate"
_TIMEOUT_SECONDS = 300.0
_FASTS_PER_CHANNEL = 50
# Not one byte more than gRPC insists on may wait at the reader's end.
_SMALLEST_BUFFERS = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


@dataclass
class Arm:
    """One turn of one kind.

    Attributes:
        gaps: seconds between messages of the streams that are read as they come.
        num_ended: streams, of any kind, whose last event came.
        peak_mib: resident memory of the scheduler at its highest, seen every 50 ms.
    """

    gaps: list[float] = field(default_factory=list)
    num_ended: int = 0
    peak_mib: float = 0.0

    def summary(self) -> dict[str, float]:
        """The figures: ITL in ms."""
        cuts = statistics.quantiles(self.gaps, n=100)
        return {
            "itl_p50_ms": 1e3 * cuts[49],
            "itl_p99_ms": 1e3 * cuts[98],
            "num_gaps": len(self.gaps),
            "num_ended": self.num_ended,
            "peak_mib": self.peak_mib,
        }


async def read_stream(
    channel: grpc.aio.Channel, request: bytes, arm: Arm, pause: float | None
) -> None:
    """Read one stream to its end; with a pause after each message, or as it comes."""
    call = channel.unary_stream(_GENERATE)(request, timeout=_TIMEOUT_SECONDS)
    last: float | None = None
    async for _ in call:
        now = time.perf_counter()
        if pause is not None:
            await asyncio.sleep(pause)
        elif last is not None:
            arm.gaps.append(now - last)
        last = now
    arm.num_ended += 1


async def run_arm(options: argparse.Namespace, service: SimulatedService, num_slow: int) -> Arm:
    """Run all streams of one turn."""
    arm = Arm()
    num_fast = options.streams - num_slow
    kinds = [(num_fast, _FASTS_PER_CHANNEL, (), None)]
    kinds += [(num_slow, 1, _SMALLEST_BUFFERS, options.pause)]
    channels: list[grpc.aio.Channel] = []
    watch = asyncio.create_task(_watch_memory(service, arm))
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS), asyncio.TaskGroup() as group:
            for count, per_channel, buffers, pause in kinds:
                for number in range(count):
                    if number % per_channel == 0:
                        alone = ("grpc.use_local_subchannel_pool", 1)
                        channel = grpc.aio.insecure_channel(
                            service.target, options=(alone, *buffers)
                        )
                        channels.append(channel)
                    request = _request(len(channels) * 1000 + number, options.tokens)
                    group.create_task(read_stream(channels[-1], request, arm, pause))
    finally:
        watch.cancel()
        for channel in channels:
            await channel.close(None)
    return arm


def _request(number: int, num_tokens: int) -> bytes:
    return inference_pb2.GenerateRequest(
        tokens={"ids": [1000 + number % 40_000, *range(2000, 2020)]},
        stopping={"max_tokens": num_tokens, "ignore_eos": True},
        sampling={"temperature": 0.0},
        cache={"disable": True},
    ).SerializeToString()


async def _watch_memory(service: SimulatedService, arm: Arm) -> None:
    while True:
        arm.peak_mib = max(arm.peak_mib, service.memory_mib()["VmRSS"])
        await asyncio.sleep(0.05)


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Run all rounds; returns the figures."""
    num_blocks = options.streams * (-(-(options.tokens + 24) // 16) + 2)
    rows = {"max_num_rows": options.streams, "num_device_blocks": num_blocks}
    flags = ["--max-num-seqs", str(options.streams), "--max-queue", str(options.streams)]
    arms: dict[str, list[dict[str, float]]] = {"none slow": [], "some slow": []}
    async with simulated_service(
        model=options.model,
        steps_per_second=options.rate,
        description=rows,
        scheduler_flags=flags,
    ) as service:
        await run_arm(argparse.Namespace(**{**vars(options), "tokens": 4}), service, 0)
        for turn in range(1, options.rounds + 1):
            for name, num_slow in (("none slow", 0), ("some slow", options.slow)):
                arms[name].append((await run_arm(options, service, num_slow)).summary())
                sys.stderr.write(f"round {turn}, {name}: {json.dumps(arms[name][-1])}\n")
        async with AsyncClient(service.target) as client:
            (left,) = (await client.snapshot()).executors
    medians = {
        name: {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
        for name, turns in arms.items()
    }
    return {
        "medians": medians,
        "itl_p99_ratio": medians["some slow"]["itl_p99_ms"] / medians["none slow"]["itl_p99_ms"],
        "peak_mib_more": medians["some slow"]["peak_mib"] - medians["none slow"]["peak_mib"],
        "blocks_left": left.pool.num_referenced,
        "rounds": arms,
    }


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure what slow readers cost the others.")
    add = parser.add_argument
    add("--streams", type=int, default=500, metavar="N", help="at once [500]")
    add("--slow", type=int, default=50, metavar="N", help="of them, in the second arm [50]")
    add("--tokens", type=int, default=120, metavar="N", help="of each stream [120]")
    add("--pause", type=float, default=2.0, metavar="S", help="of a slow reader [2]")
    add("--rate", type=float, default=5.0, metavar="STEPS/S", help="of the executor [5]")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each arm [3]")
    add("--model", default="smollm2-135m-instruct", metavar="NAME", help="as of the scheduler")
    return parser.parse_args(argv)


def main() -> None:
    """Measure and print JSON."""
    found = asyncio.run(measure(arguments()))
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
