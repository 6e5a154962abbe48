"""The real scheduler, as a process, before a simulated executor that computes nothing.

For what only the scheduler's own cost decides: memory, streams by the hundred.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from octavo_client import AsyncClient, ConnectionFailed, Unavailable
from octavo_client._process import Child
from octavo_client._socket import settle_address

_CONNECT_SECONDS = 30.0
_STOP_SECONDS = 10.0
_KIB_PER_MIB = 1024
_DESCRIPTION = {
    "model": "simulated",
    "block_size": 16,
    "num_device_blocks": 2048,
    "max_model_len": 2048,
    "max_num_batched_tokens": 8192,
    "max_num_rows": 128,
    "vocab_size": 49_152,
}


@dataclass(frozen=True)
class SimulatedService:
    """A scheduler that is connected to its executor.

    Attributes:
        target: of the public API.
        pid: of the scheduler.
    """

    target: str
    pid: int

    def memory_mib(self) -> dict[str, float]:
        """Resident memory of the scheduler: VmRSS now, VmHWM at most so far, in MiB."""
        found = {}
        for line in Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                found[name] = int(value.split()[0]) / _KIB_PER_MIB
        return found


@asynccontextmanager
async def simulated_service(
    *,
    model: str,
    steps_per_second: float,
    description: dict[str, object] | None = None,
    scheduler_flags: Sequence[str] = (),
) -> AsyncIterator[SimulatedService]:
    """Start both, and stop them in the end.

    Args:
        model: whose tokenizer the scheduler reads.
        steps_per_second: of the executor.
        description: what the executor says of itself, where it differs from the usual.
        scheduler_flags: more of them.

    Raises:
        TimeoutError: if they do not connect.
    """
    executor = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "scheduler_svc.bench_executors"),
        *(json.dumps(_DESCRIPTION | (description or {})), "1", str(steps_per_second)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert executor.stdout is not None
    (executor_address,) = json.loads(await executor.stdout.readline())
    address = settle_address("127.0.0.1:0", "--listen")
    with tempfile.TemporaryDirectory() as folder:
        scheduler = Child("scheduler", Path(folder) / "scheduler.log", echo=False)
        flags = ["--model", model, "--listen", address, "--executors", executor_address]
        try:
            await scheduler.start("scheduler_svc", [*flags, *scheduler_flags])
            await _until_connected(address)
            yield SimulatedService(address, scheduler.pid)
        finally:
            await scheduler.stop(_STOP_SECONDS)
            executor.terminate()
            await executor.wait()


async def _until_connected(address: str) -> None:
    async with asyncio.timeout(_CONNECT_SECONDS), AsyncClient(address) as client:
        while True:
            with suppress(ConnectionFailed, Unavailable):
                if any(executor.connected for executor in (await client.snapshot()).executors):
                    return
            await asyncio.sleep(0.1)
