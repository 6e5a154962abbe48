"""Tests of octavo_gateway.config, and of how the command refuses to start."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from octavo_gateway.config import ENV_PREFIX, GatewayConfig
from octavo_gateway.errors import StartupError

GATEWAY = [sys.executable, "-P", "-m", "octavo_gateway"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GatewayConfig.model_fields:
        monkeypatch.delenv(ENV_PREFIX + name.upper(), raising=False)


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag, then its variable, then the default."""
    monkeypatch.setenv("OCTAVO_GATEWAY_TIMEOUT", "7")
    monkeypatch.setenv("OCTAVO_GATEWAY_CORS_ORIGINS", "https://a, https://b")
    config = GatewayConfig.from_args(["--timeout", "8"])
    assert (config.timeout, config.cors_origins) == (8, ("https://a", "https://b"))
    assert GatewayConfig.from_args([]).timeout == 7


BAD_FLAGS = [
    (["--timeout", "0"], "--timeout", "above 0"),
    (["--timeout", "soon"], "--timeout", "number"),
    (["--max-concurrent-requests", "0"], "--max-concurrent-requests", "at least 1"),
    (["--max-body-bytes", "5"], "--max-body-bytes", "1024"),
    (["--log-level", "loud"], "--log-level", "one of debug"),
    (["--listen", "8000"], "--listen", "HOST:PORT"),
    (["--listen", "::1:8000"], "--listen", "HOST:PORT"),
    (["--listen", "localhost:65536"], "--listen", "up to 65535"),
    (["--listen", "0.0.0.0:8000"], "--listen", "--insecure-bind"),
    (["--target", "scheduler:50051"], "--target", "--insecure-target"),
    (["--target", "127.0.0.1:1,10.0.0.1:1"], "--target", "--insecure-target"),
    (["--target", "a:1,b:1"], "--target", "a list of IP addresses"),
    (["--target", "scheduler"], "--target", "HOST:PORT"),
    (["--tls-cert", "a.pem"], "--tls-key", "both"),
    (["--key-file", "a.pem"], "--cert-file", "both"),
    (["--frobnicate"], "--frobnicate", "--help"),
]


@pytest.mark.parametrize(("args", "flag", "bound"), BAD_FLAGS)
def test_a_wrong_flag_is_named_with_its_bound(args: list[str], flag: str, bound: str) -> None:
    """In one line."""
    with pytest.raises(StartupError) as caught:
        GatewayConfig.from_args(args)
    message = str(caught.value)
    assert flag in message
    assert bound in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "args",
    [
        ["--listen", "[::1]:0"],
        ["--listen", "0.0.0.0:0", "--insecure-bind"],
        ["--listen", "0.0.0.0:0", "--tls-cert", "a", "--tls-key", "b"],
        ["--target", "grpcs://scheduler:50051"],
        ["--target", "scheduler:50051", "--ca-file", "a"],
        ["--target", "scheduler:50051", "--insecure-target"],
        ["--target", "[::1]:50051"],
        ["--target", "grpc://localhost:50051"],
        ["--target", "unix:/run/octavo.sock"],
        ["--target", "127.0.0.1:1,127.0.0.2:1"],
        ["--target", "10.0.0.1:1,10.0.0.2:1", "--insecure-target"],
        ["--target", "grpcs://10.0.0.1:1,10.0.0.2:1", "--server-name", "scheduler"],
    ],
)
def test_what_is_safe_or_allowed_is_taken(args: list[str]) -> None:
    """Addresses of this machine, TLS, and what was asked for by name."""
    GatewayConfig.from_args(args)


def test_every_flag_has_help_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """--help is for people: no Python in it."""
    with pytest.raises(SystemExit):
        GatewayConfig.from_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name in GatewayConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in shown
    assert shown.count("(default:") == len(GatewayConfig.model_fields)
    assert "None" not in shown
    assert "PosixPath" not in shown


def refusal(*args: str) -> tuple[int, str]:
    done = subprocess.run(
        [*GATEWAY, *args], capture_output=True, text=True, timeout=30, check=False
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith("octavo gateway: ")
    return done.returncode, line


def test_a_port_in_use_is_one_line() -> None:
    """Saying which flag to change; nothing was started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, line = refusal("--listen", f"127.0.0.1:{taken.getsockname()[1]}")
    assert code == 1
    assert "in use" in line
    assert "--listen" in line


def test_a_certificate_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """Naming the flag and what is wrong."""
    missing, garbage = tmp_path / "missing.pem", tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    for file, said in ((missing, "No such file"), (garbage, "no PEM certificate")):
        flags = ("--listen", "127.0.0.1:0", "--tls-cert", str(file), "--tls-key", str(file))
        code, line = refusal(*flags)
        assert code == 1
        assert said in line
        assert "--tls-cert" in line


def test_a_wrong_flag_ends_with_the_status_of_wrong_usage() -> None:
    """2, as for every command."""
    code, line = refusal("--listen", "nowhere")
    assert code == 2
    assert "--listen must be HOST:PORT" in line
