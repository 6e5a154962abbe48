"""Real processes, the real model, and plain transformers as the judge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from octavo_client import AsyncClient
from octavo_client._local import LocalOptions, LocalStack

from executor_svc.model_store import resolve
from tests.e2e.judge import Judge

Served = tuple[AsyncClient, LocalStack]
Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model, fetched into the store if it is not there yet."""
    from executor_svc.config import ExecutorConfig

    config = ExecutorConfig()
    return resolve(config.model, config.model_store)


@pytest.fixture(scope="session")
def judge(model_folder: Path) -> Judge:
    """Plain transformers on the same weights, in fp32."""
    return Judge(model_folder)


@pytest.fixture(scope="session")
def serve(model_folder: Path) -> Serve:
    """Start both services, sanitizer on, and a client; options are those of LocalOptions."""

    @asynccontextmanager
    async def start(**options: object) -> AsyncIterator[Served]:
        defaults: dict[str, object] = {
            "model": str(model_folder),
            "listen": "127.0.0.1:0",
            "executor_args": ("--kv-check",),
        }
        local = LocalOptions(**{**defaults, **options})  # type: ignore[arg-type]
        async with LocalStack(local) as stack, AsyncClient(stack.target) as client:
            yield client, stack

    return start
