"""An executor that is killed and comes back: every stream goes on, exactly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest
from octavo_client import AsyncClient, Delta, Unavailable
from octavo_client._process import Child

from tests.e2e.judge import Judge

NUM_TOKENS = 24


def free_address() -> str:
    """An address that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


async def start_executor(model: Path, address: str, log: Path) -> Child:
    """Start an executor process."""
    child = Child("executor", log, echo=False)
    flags = ["--dtype", "float32", "--num-blocks", "200", "--kv-check"]
    await child.start("executor_svc", ["--model", str(model), "--listen", address, *flags])
    return child


async def until_serving(client: AsyncClient, seconds: float = 90.0) -> None:
    """Wait until the scheduler has its executor."""
    for _ in range(int(seconds * 10)):
        with contextlib.suppress(Unavailable):
            if (await client.snapshot()).executors[0].connected:
                return
        await asyncio.sleep(0.1)
    raise AssertionError("the executor never connected")


@pytest.mark.slow  # `make test` has tests/chaos/, which kills executors as well
async def test_streams_go_on_after_an_executor_is_killed(
    model_folder: Path, judge: Judge, tmp_path: Path
) -> None:
    """Kill -9 in mid-stream: no token is lost, repeated or changed, greedy or seeded."""
    executor_at, scheduler_at = free_address(), free_address()
    executor = await start_executor(model_folder, executor_at, tmp_path / "executor-1.log")
    scheduler = Child("scheduler", tmp_path / "scheduler.log", echo=False)
    await scheduler.start(
        "scheduler_svc",
        ["--model", str(model_folder), "--listen", scheduler_at, "--executors", executor_at],
    )
    prompt = judge.encode("The old clock in the hall")
    try:
        async with AsyncClient(scheduler_at) as client:
            await until_serving(client)
            greedy = client.stream(
                tokens=prompt, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, timeout=150
            )
            seeded = client.stream(
                tokens=prompt,
                max_tokens=NUM_TOKENS,
                temperature=0.8,
                top_p=1.0,
                top_k=0,
                seed=5,
                n=3,
                ignore_eos=True,
                timeout=150,
            )
            outputs: dict[tuple[str, int], list[int]] = {}
            started = asyncio.Event()

            async def follow(name: str, stream: object) -> None:
                async with stream as events:  # type: ignore[attr-defined]
                    async for event in events:
                        if isinstance(event, Delta):
                            found = outputs.setdefault((name, event.index), [])
                            found += event.token_ids
                            if len(found) >= 4:
                                started.set()

            async with asyncio.TaskGroup() as group:
                group.create_task(follow("greedy", greedy))
                group.create_task(follow("seeded", seeded))
                await asyncio.wait_for(started.wait(), 60)
                executor.kill()
                await executor.stop(5)
                executor = await start_executor(
                    model_folder, executor_at, tmp_path / "executor-2.log"
                )
            counters = (await client.snapshot()).executors[0].counters
        assert counters.num_resyncs == 1
        assert judge.first_difference(prompt, outputs["greedy", 0]) is None
        for index in range(3):
            assert judge.is_drawn(
                prompt, outputs["seeded", index], seed=5, index=index, temperature=0.8
            )
        assert all(len(tokens) == NUM_TOKENS for tokens in outputs.values())
    finally:
        await scheduler.stop(10)
        await executor.stop(10)
