"""What docs/grpcurl.md shows works: calls from a shell, by server reflection alone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

from octavo_client import AsyncClient

from tests.e2e.conftest import Serve

# The environment's own, where there is one for this machine.
_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
_SECONDS = 60


async def grpcurl(target: str, *words: str, data: str | None = None) -> tuple[int, str, str]:
    """Run grpcurl; return its exit status, its output and its errors."""
    program = shutil.which("grpcurl", path=_PATH)
    assert program, "install grpcurl: https://github.com/fullstorydev/grpcurl"
    sent = [] if data is None else ["-d", data]
    process = await asyncio.create_subprocess_exec(
        program,
        "-plaintext",
        *sent,
        target,
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), _SECONDS)
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def call(target: str, method: str, request: object) -> list[dict[str, object]]:
    """Call a method; return its responses."""
    status, output, errors = await grpcurl(target, f"octavo.v1.{method}", data=json.dumps(request))
    assert status == 0, errors
    decoder, responses, rest = json.JSONDecoder(), [], output.strip()
    while rest:
        response, end = decoder.raw_decode(rest)
        responses.append(response)
        rest = rest[end:].lstrip()
    return responses


async def check_reflection(target: str) -> None:
    """Services, methods and fields are told without any file."""
    status, output, _ = await grpcurl(target, "list")
    assert status == 0
    assert {"grpc.health.v1.Health", "octavo.v1.InferenceService", "octavo.v1.AdminService"} <= set(
        output.split()
    )
    _, output, _ = await grpcurl(target, "describe", "octavo.v1.InferenceService")
    assert "Generate ( .octavo.v1.GenerateRequest ) returns ( stream .octavo.v1." in output
    _, output, _ = await grpcurl(target, "describe", "octavo.v1.SamplingParams")
    assert "float temperature = 1" in output


async def check_calls(target: str, client: AsyncClient) -> None:
    """A stream, two unary calls, the admin's view and an error with its details."""
    request = {
        "text": "The capital of France is",
        "sampling": {"temperature": 0},
        "stopping": {"maxTokens": 6, "ignoreEos": True},
    }
    events = await call(target, "InferenceService/Generate", request)
    assert "started" in events[0]
    assert "usage" in events[-1]
    text = "".join(str(event.get("delta", {}).get("text", "")) for event in events)  # type: ignore[attr-defined]
    answer = await client.generate(
        "The capital of France is", temperature=0, max_tokens=6, ignore_eos=True
    )
    assert text == answer.text
    (tokens,) = await call(target, "InferenceService/Tokenize", {"text": "Hello world"})
    assert tokens == {"token_ids": list(await client.tokenize("Hello world"))}
    (snapshot,) = await call(target, "AdminService/Snapshot", {})
    assert snapshot["snapshot"]["executors"][0]["connected"] is True  # type: ignore[index]
    bad = json.dumps({"text": "a", "sampling": {"temperature": -1}})
    status, _, errors = await grpcurl(target, "octavo.v1.InferenceService/Generate", data=bad)
    assert status != 0
    assert "InvalidArgument" in errors
    assert "sampling.temperature must be between 0 and 100" in errors


async def test_grpcurl_needs_nothing_but_the_address(serve: Serve) -> None:
    """The scheduler describes itself, and a request in JSON is answered in JSON."""
    async with serve(dtype="float32", num_blocks=100) as (client, stack):
        await check_reflection(stack.target)
        await check_calls(stack.target, client)
