"""What cannot start says why in one line and exits with a status."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def run(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a module as its own process until it ends."""
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    """The process failed and left exactly one line for people."""
    assert result.returncode not in (0, None)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert "Traceback" not in result.stderr
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize("module", ["scheduler_svc", "executor_svc"])
def test_a_missing_model_is_one_line(module: str) -> None:
    """A model that is nowhere: the line names it and the command to fetch it."""
    line = one_line(run(module, "--model", "no-such-model"))
    assert "no-such-model" in line


@pytest.mark.parametrize("module", ["scheduler_svc", "executor_svc"])
def test_a_busy_port_is_one_line(module: str) -> None:
    """A port that is taken: the line names it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert address in one_line(run(module, "--listen", address))


@pytest.mark.parametrize(
    ("module", "flag", "value"),
    [
        ("scheduler_svc", "--max-queue", "0"),
        ("scheduler_svc", "--watermark", "2"),
        ("scheduler_svc", "--executors", "nowhere"),
        ("scheduler_svc", "--listen", "0.0.0.0:1"),
        ("executor_svc", "--block-size", "7"),
        ("executor_svc", "--dtype", "int3"),
        ("executor_svc", "--listen", "0.0.0.0:1"),
    ],
)
def test_a_bad_flag_is_one_line(module: str, flag: str, value: str) -> None:
    """A flag out of bounds: the line names the flag."""
    assert flag in one_line(run(module, flag, value))


def test_wrong_target_is_one_line() -> None:
    """`octavo generate` against a port where nothing listens."""
    result = run("octavo_client", "generate", "--target", "127.0.0.1:1", "Hello")
    assert "127.0.0.1:1" in one_line(result)


async def test_a_mismatched_executor_is_refused(model_folder: Path, tmp_path: Path) -> None:
    """A scheduler of another model never claims the executor and names both fingerprints."""
    from octavo_client._local import LocalOptions, LocalStack
    from octavo_client._process import Child

    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    config["rope_theta"] = 12345.0
    (other / "config.json").write_text(json.dumps(config), encoding="utf-8")
    options = LocalOptions(model=str(model_folder), listen="127.0.0.1:0")
    async with LocalStack(options) as stack:
        log = tmp_path / "second.log"
        executors = next(
            part
            for part in Path(f"/proc/{stack.pid('scheduler')}/cmdline").read_text().split("\0")
            if part.startswith("127.0.0.1:") and part != stack.target
        )
        child = Child("second", log, echo=False)
        await child.start(
            "scheduler_svc",
            ["--model", str(other), "--listen", "127.0.0.1:0", "--executors", executors],
        )
        try:
            import asyncio

            for _ in range(300):
                text = log.read_text(encoding="utf-8") if log.exists() else ""
                if "another model" in text:
                    break
                await asyncio.sleep(0.1)
        finally:
            await child.stop(10)
        assert text.count("fingerprint") >= 1 and "another model" in text
