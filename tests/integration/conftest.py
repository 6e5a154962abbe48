"""One tiny random model and servers over it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from executor_svc.device_thread import Engine
from executor_svc.executor import Executor
from executor_svc.server import ExecutorServer
from tests.integration.executor_rig import Running, config
from tests.integration.fleet_rig import FleetRig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
        )
    )
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def executor(folder: Path) -> Executor:
    return Executor.load(config(), folder)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    """Starts servers over an engine and takes them down again."""
    running: list[ExecutorServer] = []
    channels: list[grpc.aio.Channel] = []

    async def begin(load: Callable[[], Engine], *, ready: bool = True, **fields: Any) -> Running:
        server = ExecutorServer(config(**fields), load)
        running.append(server)
        await server.start()
        if ready:
            await server.wait_ready()
        channels.append(grpc.aio.insecure_channel(server.address))
        return Running(server, channels[-1])

    yield begin
    for channel in channels:
        await channel.close()
    for server in running:
        await server.stop()


@pytest.fixture
async def running(start: Callable[..., Any], executor: Executor) -> Running:
    executor.reset()
    return await start(lambda: executor)


@pytest.fixture
async def fleet() -> AsyncIterator[FleetRig]:
    """Executors and engines to be started, which end with the test."""
    made = FleetRig()
    yield made
    await made.stop()
