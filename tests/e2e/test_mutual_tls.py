"""Real processes and the default model, with mutual TLS on both hops and a key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from octavo_client import AsyncClient, Delta, Finished, Health, OctavoError, Unauthenticated
from octavo_client._process import Child
from octavo_client._socket import settle_address

from scheduler_svc.security.key_file import add_key
from tests.e2e.judge import Judge
from tests.support.certificates import Authority

START_SECONDS = 120
PROMPT = "The capital of France is"


class Stack:
    """Both services as processes, each with a certificate of one CA and asking for one."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        authority = Authority("octavo")
        self.ca = authority.write(folder)
        self.pairs = {}
        for name in ("executor", "scheduler", "client"):
            # The executor's name is its service's, as it would be in a cluster.
            names = ("executor.octavo.svc",) if name == "executor" else ()
            self.pairs[name] = authority.issue(*names).write(folder, name)
        self.key = add_key(folder / "keys.toml", name="test", tenant="testers", admin=False)
        self.target = settle_address("127.0.0.1:0", "--listen")
        self._executor = settle_address("127.0.0.1:0", "--listen")
        self._model = str(model)
        self.children = [
            Child(name, folder / f"{name}.log", echo=False) for name in ("executor", "scheduler")
        ]

    async def start(self) -> None:
        """Start both; neither is ready yet."""
        executor, scheduler = self.children
        port = ["--model", self._model, "--tls-client-ca", str(self.ca)]
        options = ["--listen", self._executor, "--dtype", "float32", "--kv-check"]
        await executor.start("executor_svc", [*port, *self._pair("executor"), *options])
        cert, key = map(str, self.pairs["scheduler"])
        hop = ["--executor-ca", str(self.ca), "--executor-cert", cert, "--executor-key", key]
        await scheduler.start(
            "scheduler_svc",
            [
                *port, *self._pair("scheduler"), "--listen", self.target,
                "--executors", self._executor, *hop,
                "--executor-server-name", "executor.octavo.svc",
                "--api-keys", str(self._folder / "keys.toml"),
            ],
        )  # fmt: skip

    def _pair(self, name: str) -> list[str]:
        cert, key = map(str, self.pairs[name])
        return ["--tls-cert", cert, "--tls-key", key]

    def connect(self, **options: object) -> AsyncClient:
        """Connect as a client with certificate and key."""
        cert, key = self.pairs["client"]
        settings = {
            "ca_file": self.ca, "cert_file": cert, "key_file": key, "api_key": self.key, **options,
        }  # fmt: skip
        return AsyncClient(self.target, **settings)  # type: ignore[arg-type]

    async def until_ready(self, client: AsyncClient) -> None:
        """Wait until the scheduler has its executor."""
        async with asyncio.timeout(START_SECONDS):
            while True:
                for child in self.children:
                    assert not child.has_ended, child.log.read_text()
                try:
                    if await client.health() is Health.SERVING:
                        return
                except OctavoError:
                    pass
                await asyncio.sleep(0.1)


async def test_an_answer_comes_over_mutual_tls_on_both_hops(
    tmp_path: Path, model_folder: Path, judge: Judge
) -> None:
    """Plain transformers' tokens, to whoever has certificate and key; both then drain well."""
    stack = Stack(tmp_path, model_folder)
    try:
        await stack.start()
        async with stack.connect() as client:
            await stack.until_ready(client)
            tokens: list[int] = []
            ends = []
            async with client.stream(
                PROMPT, max_tokens=12, temperature=0, ignore_eos=True
            ) as stream:
                async for event in stream:
                    if isinstance(event, Delta):
                        tokens += event.token_ids
                    elif isinstance(event, Finished):
                        ends.append(event.num_tokens)
            assert ends == [len(tokens)] == [12]
            assert judge.first_difference(judge.encode(PROMPT), tokens) is None
        async with stack.connect(api_key="") as client:
            with pytest.raises(Unauthenticated):
                await client.model()
        async with stack.connect(cert_file="", key_file="") as client:
            with pytest.raises(OctavoError):
                await client.health(timeout=5)
        logs = "".join(child.log.read_text() for child in stack.children)
        assert stack.key not in logs
        for child in reversed(stack.children):
            await child.stop(30)
            assert await child.wait() == 0, child.log.read_text()
    finally:
        for child in stack.children:
            await child.stop(5)
