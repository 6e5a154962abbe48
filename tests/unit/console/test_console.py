"""The console's modules that need no page, tested by Node."""

from __future__ import annotations

from pathlib import Path

from tests.support import node

FOLDER = Path(__file__).parent


async def test_its_own_tests_pass() -> None:
    """Reading lines, the grid, colours and patterns, rates, streams and their ends."""
    suites = sorted(str(path) for path in FOLDER.glob("*.test.mjs"))
    assert suites
    output = await node.run("node", "--test", "--test-reporter=tap", *suites)
    assert "# fail 0" in output
