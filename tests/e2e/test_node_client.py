"""The Node client against the running services and the real model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from octavo_client import AsyncClient

from tests.e2e.conftest import Serve
from tests.e2e.prompts import prompts
from tests.support import node

_SEED = 2**64 - 59  # a double has no place for it


async def _expected(client: AsyncClient) -> dict[str, object]:
    """What the Python SDK gives for the requests that the Node tests make."""
    story, other = prompts(2)[1], prompts(1)[0]
    greedy = await client.generate(story, temperature=0, max_tokens=48, ignore_eos=True)
    seeded = await client.generate(
        other, n=2, seed=_SEED, temperature=0.9, top_p=0.95, max_tokens=16
    )
    messages = [{"role": "user", "content": "Name a colour."}]
    chat = await client.generate(messages=messages, temperature=0, max_tokens=12)
    return {
        "greedy": {"prompt": story, "text": greedy.text},
        "seeded": {
            "prompt": other,
            "seed": str(_SEED),
            "choices": [choice.token_ids for choice in seeded.choices],
        },
        "chat": {"messages": messages, "text": chat.text},
        "tokens": {
            "text": other,
            "ids": await client.tokenize(other),
            "model": dataclasses.asdict(await client.model()),
        },
    }


async def test_the_node_client_is_true_to_the_python_sdk(serve: Serve, tmp_path: Path) -> None:
    """Same tokens and texts; errors with fields; cancels free blocks; cut streams go on."""
    node.set_up()
    async with serve(dtype="float32", num_blocks=400) as (client, stack):
        expected = tmp_path / "expected.json"
        expected.write_text(json.dumps(await _expected(client)), encoding="utf-8")
        output = await node.run(
            "node",
            "--test",
            "--test-reporter=tap",
            "test/e2e/service.test.js",
            environment={
                "OCTAVO_TEST_TARGET": stack.target,
                "OCTAVO_TEST_EXPECTED": str(expected),
                "OCTAVO_TEST_PROTOS": str(node.ROOT / "proto"),
            },
        )
        assert "# fail 0" in output
        example = await node.run("node", "examples/stream.mjs", "One, two,", stack.target)
        assert example.startswith("One, two,")
        assert example.rstrip().endswith(("[length]", "[stop]"))
