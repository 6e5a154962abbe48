from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from octavo_client._local import LocalOptions, LocalStack
from octavo_client._process import LocalError

# Stands in for both services: healthy at once, and drains for as long as it may.
_SERVICE = """\
import signal, sys, time
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
print(*sys.argv[1:], flush=True)
if "--refuse" in sys.argv:
    sys.exit(print("octavo executor: --refuse is no flag", file=sys.stderr) or 2)
if "--hang" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = grpc.server(futures.ThreadPoolExecutor(2))
checks = health.HealthServicer()
checks.set("", health_pb2.HealthCheckResponse.SERVING)
health_pb2_grpc.add_HealthServicer_to_server(checks, server)
server.add_insecure_port(sys.argv[sys.argv.index("--listen") + 1])
server.start()
time.sleep(60)
"""


# Stands in for the gateway: well at once.
_GATEWAY = """\
import http.server, sys
print(*sys.argv[1:], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
host, _, port = sys.argv[sys.argv.index("--listen") + 1].rpartition(":")
http.server.HTTPServer((host, int(port)), Handler).serve_forever()
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalOptions:
    """Options of a stack of two stand-ins; temporary files go below tmp_path/temporary."""
    modules, temporary, model = (tmp_path / name for name in ("modules", "temporary", "model"))
    for folder in (modules, temporary, model):
        folder.mkdir()
    for name in ("executor_svc", "scheduler_svc"):
        (modules / f"{name}.py").write_text(_SERVICE)
    (modules / "octavo_gateway.py").write_text(_GATEWAY)
    (model / "config.json").write_text("{}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(modules), *sys.path]))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return LocalOptions(model=str(model), listen="127.0.0.1:0")


def _kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "temporary").glob("octavo-*/*.log"))


async def test_temporary_logs_go_after_a_clean_end(options: LocalOptions, tmp_path: Path) -> None:
    """What ended well leaves nothing behind."""
    async with LocalStack(options) as stack:
        assert _kept(tmp_path) == ["executor.log", "scheduler.log"]
    assert not stack.keeps_logs
    assert not stack.log_dir.exists()


async def test_a_gateway_stands_beside_the_two_if_asked_for(
    options: LocalOptions, tmp_path: Path
) -> None:
    """It gets the scheduler's address, is ready once it says so, and ends with the others."""
    async with LocalStack(replace(options, http_listen="127.0.0.1:0")) as stack:
        assert _kept(tmp_path) == ["executor.log", "gateway.log", "scheduler.log"]
        flags = (stack.log_dir / "gateway.log").read_text().split()
        assert flags[flags.index("--target") + 1] == stack.target
        assert stack.http_url == f"http://{flags[flags.index('--listen') + 1]}"
        pid = stack.pid("gateway")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_own_log_folder_stays(options: LocalOptions, tmp_path: Path) -> None:
    """A folder that was given is never removed; both services get --insecure-bind if asked."""
    logs = tmp_path / "logs"
    async with LocalStack(replace(options, log_dir=logs, insecure_bind=True)):
        pass
    for name in ("executor", "scheduler"):
        assert "--insecure-bind" in (logs / f"{name}.log").read_text().split()


async def test_a_death_is_told_before_a_short_drain(options: LocalOptions, tmp_path: Path) -> None:
    """Kill -9 of the executor is told at once, its scheduler ends soon, the logs stay."""
    async with LocalStack(replace(options, scheduler_args=("--hang",))) as stack:
        os.kill(stack.pid("executor"), signal.SIGKILL)
        with pytest.raises(LocalError, match="executor was ended by SIGKILL") as caught:
            await asyncio.wait_for(stack.wait(), 2)
        assert not caught.value.is_explained
        begin = time.monotonic()
    assert time.monotonic() - begin < 5
    assert stack.keeps_logs
    assert _kept(tmp_path) == ["executor.log", "scheduler.log"]


async def test_a_refused_flag_is_told_once(options: LocalOptions, tmp_path: Path) -> None:
    """A service that cannot start says why in the error's one line, which explains all."""
    with pytest.raises(LocalError) as caught:
        async with LocalStack(replace(options, executor_args=("--refuse",))):
            raise AssertionError("it must not start")
    message = str(caught.value)
    assert message.startswith("the executor ended with exit code 2: --refuse is no flag (log: ")
    assert caught.value.is_explained
    assert "executor.log" in _kept(tmp_path)
