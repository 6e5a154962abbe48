"""How long streams pause when their executor dies and another one is there, and for what.

    python -P tests/bench/recovery.py --streams 16 --rounds 3

One scheduler, two executors, all real processes. When every stream has its first tokens one
executor is killed (-9). Of the streams that it had is taken the longest time between two of their
tokens from then on. Beside it stand the tokens that had to be computed again, what a step took
before, and, as a second arm in turn, the same with the executor asked to drain instead: that has
to compute as much, and has nobody to suspect. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from octavo_client import AsyncClient, Delta, OctavoError
from octavo_client._process import Child
from octavo_client._socket import settle_address

_FIRST_TOKENS = 4
_START_SECONDS = 120.0
_STREAM_SECONDS = 600.0


@dataclass
class Stream:
    """When each token of one request came, in seconds of this process's clock."""

    num_prompt_tokens: int
    times: list[float] = field(default_factory=list)

    def pause_after(self, at: float) -> float:
        """The longest time between two tokens from then on; the last one before it counts."""
        before = max((t for t in self.times if t <= at), default=at)
        times = [before, *(t for t in self.times if t > at)]
        return max(b - a for a, b in itertools.pairwise(times))

    def num_tokens(self, at: float) -> int:
        """Prompt and output tokens known then."""
        return self.num_prompt_tokens + sum(t <= at for t in self.times)


async def until_claimed(client: AsyncClient, count: int) -> None:
    """Wait until the scheduler holds so many executors."""
    async with asyncio.timeout(_START_SECONDS):
        while True:
            with contextlib.suppress(OctavoError):
                executors = (await client.snapshot()).executors
                if sum(each.connected for each in executors) == count:
                    return
            await asyncio.sleep(0.1)


async def follow(client: AsyncClient, stream: Stream, number: int, length: int) -> None:
    """Read one request to its end."""
    prompt = [1 + (31 * number + 7 * position) % 20_000 for position in range(length)]
    stream.num_prompt_tokens = length
    events = client.stream(
        tokens=prompt,
        max_tokens=200,
        temperature=0,
        ignore_eos=True,
        timeout=_STREAM_SECONDS,
        request_id=f"stream-{number}",
    )
    async with events:
        async for event in events:
            if isinstance(event, Delta):
                stream.times += [time.perf_counter()] * len(event.token_ids)


class Rig:
    """The processes of one round."""

    def __init__(self, options: argparse.Namespace, logs: Path) -> None:
        self.options = options
        self.logs = logs
        self.executors: dict[str, Child] = {}
        self.scheduler = Child("scheduler", logs / "scheduler.log", echo=False)
        self.target = settle_address("127.0.0.1:0", "--listen")

    async def start(self) -> None:
        """Start two executors and a scheduler over both."""
        model = ["--model", self.options.model]
        for number in range(2):
            address = settle_address("127.0.0.1:0", "--listen")
            child = Child(f"executor-{number}", self.logs / f"executor-{number}.log", echo=False)
            flags = [*model, "--listen", address, "--dtype", "float32", "--num-threads", "1"]
            await child.start("executor_svc", flags)
            self.executors[address] = child
        flags = [*model, "--listen", self.target, "--executors", ",".join(self.executors)]
        await self.scheduler.start("scheduler_svc", flags)

    async def stop(self) -> None:
        """End everything."""
        for child in (self.scheduler, *self.executors.values()):
            child.kill()
            await child.stop(10)


async def measure(options: argparse.Namespace, *, kill: bool) -> dict[str, float]:
    """One round: start, load, take one executor away, read all to the end."""
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(options, Path(folder))
        await rig.start()
        try:
            async with AsyncClient(rig.target) as client:
                await until_claimed(client, 2)
                return await _disturb(options, rig, client, kill=kill)
        finally:
            await rig.stop()


async def _disturb(
    options: argparse.Namespace, rig: Rig, client: AsyncClient, *, kill: bool
) -> dict[str, float]:
    streams = [Stream(0) for _ in range(options.streams)]
    tasks = [
        asyncio.create_task(follow(client, stream, number, options.prompt))
        for number, stream in enumerate(streams)
    ]
    async with asyncio.timeout(_STREAM_SECONDS):
        while any(len(stream.times) < _FIRST_TOKENS for stream in streams):
            await asyncio.sleep(0.01)
    snapshot = await client.snapshot(sequences=True)
    lost = max(snapshot.executors, key=lambda executor: executor.num_running)
    theirs = {int(s.request_id.removeprefix("stream-")) for s in lost.sequences}
    at = time.perf_counter()
    child = rig.executors[lost.address]
    leaving = None
    if kill:
        child.kill()
    else:
        leaving = asyncio.create_task(child.stop(60))
    await asyncio.gather(*tasks)
    if leaving is not None:
        await leaving
    pauses = sorted(streams[number].pause_after(at) for number in theirs)
    gaps = [
        b - a for number in theirs for a, b in itertools.pairwise(streams[number].times) if b <= at
    ]
    return {
        "streams": len(theirs),
        "recomputed_tokens": sum(streams[number].num_tokens(at) for number in theirs),
        "itl_before_p50": statistics.median(gaps),
        "pause_p50": statistics.median(pauses),
        "pause_first": pauses[0],
        "pause_last": pauses[-1],
    }


async def run(options: argparse.Namespace) -> dict[str, object]:
    """All rounds of both arms, in turn."""
    arms: dict[str, list[dict[str, float]]] = {"killed": [], "drained": []}
    for _ in range(options.rounds):
        arms["killed"].append(await measure(options, kill=True))
        arms["drained"].append(await measure(options, kill=False))
    return dict(arms)


def main() -> int:
    """Print the figures as JSON, in seconds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    home = Path("~/.cache/octavo/models/smollm2-135m-instruct").expanduser()
    parser.add_argument("--model", default=str(home))
    json.dump(asyncio.run(run(parser.parse_args())), sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
