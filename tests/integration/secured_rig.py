"""Both services in this process over an engine without a model, with TLS and keys as asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo_client import AsyncStream, Delta
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from executor_svc.plan import Outcome, Plan
from executor_svc.server import ExecutorServer
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.server import SchedulerServer
from tests.integration.executor_rig import config
from tests.integration.test_engine_over_wire import FakeEngine

WAIT = 20.0
PROMPT = [5, 6, 7]


@dataclass
class SteppedEngine(FakeEngine):
    """Computes steps only while `may_run` is set, so that a test can hold streams open."""

    may_run: threading.Event = field(default_factory=threading.Event)

    def run(self, plan: Plan) -> Outcome:
        """Wait for permission, then carry out one step."""
        assert self.may_run.wait(WAIT)
        return super().run(plan)


@dataclass
class Secured:
    """A scheduler that is connected to its executor."""

    scheduler: SchedulerServer
    engine: SteppedEngine

    @property
    def target(self) -> str:
        """Where clients connect to."""
        return f"127.0.0.1:{self.scheduler.port}"


async def rest_of(stream: AsyncStream) -> list[int]:
    """Read a stream to its end; give the tokens of its only choice."""
    return [t async for event in stream if isinstance(event, Delta) for t in event.token_ids]


def write_model(folder: Path) -> Path:
    """Write what the scheduler reads of a model: a context of 256, byte-level text."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {"vocab_size": 97, "max_position_embeddings": 256, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def _byte_vocabulary() -> dict[str, int]:
    return {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}


@asynccontextmanager
async def serving(
    folder: Path, executor: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Secured]:
    """Run both services; `executor` and `settings` are fields of their settings.

    The scheduler reaches the executor by `executor_server_name` and the like, if given.
    """
    engine = SteppedEngine()
    engine.may_run.set()
    below = ExecutorServer(config(**(executor or {})), lambda: engine)
    await below.start()
    await below.wait_ready()
    model = write_model(folder / "model")
    settings = {"model": str(model), "listen": "127.0.0.1:0", **settings}
    scheduler = SchedulerServer(SchedulerConfig(executors=(below.address,), **settings))
    await scheduler.start()
    try:
        async with asyncio.timeout(WAIT):
            while not scheduler.engine.is_healthy:
                await asyncio.sleep(0.01)
        yield Secured(scheduler, engine)
    finally:
        engine.may_run.set()
        await scheduler.stop()
        await below.stop()
