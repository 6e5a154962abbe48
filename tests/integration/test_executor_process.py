"""`octavo executor` as a process: exit statuses, signals and what stands on stderr."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

WAIT = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def command(*flags: str) -> list[str]:
    return [sys.executable, "-P", "-m", "executor_svc", *flags]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OCTAVO_")}
    return {**kept, "OCTAVO_MODEL_STORE": str(tmp_path), "HF_HUB_OFFLINE": "1"}


def run(environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*flags), env=environment, capture_output=True, text=True, timeout=WAIT, check=False
    )


def test_sigterm_drains_and_exits_with_zero(folder: Path, environment: dict[str, str]) -> None:
    """It says where it listens once it is ready, then leaves cleanly when told."""
    process = subprocess.Popen(
        command("--model", str(folder), "--listen", "127.0.0.1:0", "--num-threads", "1"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        ready = json.loads(process.stderr.readline())
        assert ready["event"] == "executor_ready"
        host, port = ready["address"].rsplit(":", 1)
        socket.create_connection((host, int(port)), timeout=WAIT).close()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert [json.loads(line)["event"] for line in err.splitlines()] == [
        "drain_started",
        "executor_stopped",
    ]
    assert out == ""


def test_sigterm_while_loading_exits_with_zero(folder: Path, environment: dict[str, str]) -> None:
    """A load in progress is left at once, without a word of the interpreter's."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        command("--model", str(folder), "--listen", address, "--num-threads", "1"),
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        host, port = address.rsplit(":", 1)
        give_up = time.monotonic() + WAIT
        while not listens(host, int(port)):  # it listens before it loads
            assert time.monotonic() < give_up
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=WAIT)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["executor_stopped"]


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=WAIT).close()
    except OSError:
        return False
    return True


def test_a_busy_port_is_one_line(folder: Path, environment: dict[str, str]) -> None:
    """The address that cannot be had is named, without a traceback, status 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run(environment, "--model", str(folder), "--listen", address)
    assert ended.returncode == 1
    assert ended.stderr == (
        f"octavo executor: cannot listen on {address}: is the port in use? "
        "Give --listen another one\n"
    )


def test_a_missing_model_is_one_line(environment: dict[str, str], tmp_path: Path) -> None:
    """A model that is nowhere is named before torch is loaded, in one line, status 1."""
    # Were torch looked for first, this would be the complaint.
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    environment["PYTHONPATH"] = str(tmp_path)
    ended = run(environment, "--model", str(tmp_path / "nowhere"), "--listen", "127.0.0.1:0")
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("octavo executor: ")
    assert "nowhere" in line


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_extra_is_one_line(environment: dict[str, str], missing: str) -> None:
    """What runs a model is missed before a model is looked for, in one line, status 1."""
    code = (
        "import importlib.util, sys\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name == {missing!r} else found(name)\n"
        "from executor_svc.__main__ import main\n"
        "sys.exit(main(['--model', '/no/such/model']))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr == (
        f"octavo executor: {missing} is not installed: pip install 'octavo[executor]'\n"
    )


def test_a_wrong_flag_is_one_line(environment: dict[str, str]) -> None:
    """A flag out of bounds is named with its bound, status 2."""
    ended = run(environment, "--block-size", "4")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "--block-size" in line
    assert "8" in line


def test_help_loads_nothing_heavy(environment: dict[str, str]) -> None:
    """--help and a wrong flag are answered without torch or gRPC."""
    code = (
        "import sys\n"
        "from executor_svc.__main__ import main\n"
        "assert main(['--no-such-flag']) == 2\n"
        "print(sorted({'torch', 'transformers', 'grpc'} & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=True,
    )
    assert ended.stdout == "[]\n"
