"""Real processes, the real model, and plain transformers as the judge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
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


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def served(serve: Serve) -> AsyncIterator[Served]:
    """One stack with a gateway, sanitizer on, for all tests that leave it as it was.

    Its pool is smaller than the model's context.
    """
    async with serve(
        dtype="float32",
        block_size=16,
        num_blocks=400,
        num_host_blocks=40,
        http_listen="127.0.0.1:0",
    ) as pair:
        yield pair


@pytest.fixture
def client(served: Served) -> AsyncClient:
    """A client of the shared stack."""
    return served[0]
