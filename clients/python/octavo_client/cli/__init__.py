"""The octavo command. Everything but this file loads on use, so that it starts quickly."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (None: the process's); return the exit code."""
    from octavo_client.cli._main import run

    return run(argv)
