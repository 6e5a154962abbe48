from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from octavo_client._process import Child, LocalError, run_to_last_line
from octavo_client._socket import connect_address, settle_address

Writer = Callable[[str], object]


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writer:
    """Writes the module `victim` that child processes can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return (tmp_path / "victim.py").write_text


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def _wait_until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.02)
    return False


async def test_a_death_is_told_with_code_and_last_line(
    write_module: Writer, tmp_path: Path
) -> None:
    """The error of an ended service has its exit code, its last line and its log."""
    write_module("import sys; print('one'); sys.exit('no such model: x')")
    child = Child("executor", tmp_path / "e.log", echo=False)
    await child.start("victim", [])
    assert await child.wait() == 1
    error = child.error()
    assert str(error).startswith("the executor ended with exit code 1: no such model: x")
    assert error.log == tmp_path / "e.log"


async def test_a_killed_service_is_told_by_signal(write_module: Writer, tmp_path: Path) -> None:
    """Kill -9 shows as SIGKILL."""
    write_module("import time; time.sleep(60)")
    child = Child("scheduler", tmp_path / "s.log", echo=False)
    await child.start("victim", [])
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    assert "was ended by SIGKILL" in str(child.error())


async def test_stop_drains_first(write_module: Writer, tmp_path: Path) -> None:
    """SIGTERM comes first, and a service that ends by it is not killed."""
    write_module(
        "import signal, sys, time\n"
        "def drain(*_):\n    print('drained', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, drain); print('up', flush=True); time.sleep(60)"
    )
    log = tmp_path / "s.log"
    child = Child("scheduler", log, echo=False)
    await child.start("victim", [])
    assert _wait_until(lambda: "up" in log.read_text())
    await child.stop(10)
    assert await child.wait() == 0
    assert "drained" in log.read_text()


async def test_stop_kills_what_does_not_drain(write_module: Writer, tmp_path: Path) -> None:
    """A service that ignores SIGTERM is killed after its time."""
    write_module(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True); time.sleep(60)"
    )
    log = tmp_path / "s.log"
    child = Child("scheduler", log, echo=False)
    await child.start("victim", [])
    assert _wait_until(lambda: "up" in log.read_text())
    await child.stop(0.2)
    assert await child.wait() == -signal.SIGKILL


def test_a_killed_parent_leaves_no_service(write_module: Writer, tmp_path: Path) -> None:
    """When the parent dies by kill -9, its services end too."""
    write_module("import time; time.sleep(60)")
    parent = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-c",
            "import asyncio, pathlib, sys\n"
            "from octavo_client._process import Child\n"
            "async def main():\n"
            "    child = Child('x', pathlib.Path(sys.argv[1]), echo=False)\n"
            "    await child.start('victim', [])\n"
            "    print(child.pid, flush=True)\n"
            "    await asyncio.sleep(60)\n"
            "asyncio.run(main())",
            str(tmp_path / "x.log"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert _wait_until(lambda: b"victim" in Path(f"/proc/{pid}/cmdline").read_bytes())
    time.sleep(0.2)
    parent.kill()
    parent.wait(10)
    assert _wait_until(lambda: _gone(pid))


async def test_last_line_of_a_command(write_module: Writer) -> None:
    """The last line of stdout counts; a failure carries its last line of stderr."""
    write_module(
        "import sys\nprint('noise'); print('/models/' + sys.argv[1]); sys.exit('--fail' in sys.argv"
        " and 'error: no such thing')"
    )
    assert await run_to_last_line("fetch", "victim", ["x"]) == "/models/x"
    with pytest.raises(LocalError, match="fetch failed: no such thing"):
        await run_to_last_line("fetch", "victim", ["--fail"])


def test_port_0_becomes_a_free_port() -> None:
    """Port 0 is settled to one that can be listened at."""
    host, port = settle_address("127.0.0.1:0", "--listen").split(":")
    with socket.socket() as probe:
        probe.bind((host, int(port)))
    assert int(port) > 0


def test_a_port_shared_by_others_counts_as_busy() -> None:
    """A port that another server has opened for sharing (as gRPC does) is refused."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LocalError, match=f"port {port} is in use.*--listen"):
            settle_address(f"127.0.0.1:{port}", "--listen")


@pytest.mark.parametrize("listen", ["50051", "localhost", "localhost:x", "localhost:70000"])
def test_bad_addresses_are_named(listen: str) -> None:
    """What is no HOST:PORT is refused with the flag's name."""
    with pytest.raises(LocalError, match="--listen must be HOST:PORT"):
        settle_address(listen, "--listen")


def test_wildcards_are_reached_by_loopback() -> None:
    """What listens everywhere is reached at loopback."""
    assert connect_address("0.0.0.0:1") == "127.0.0.1:1"
    assert connect_address("[::]:1") == "[::1]:1"
    assert connect_address("10.0.0.7:1") == "10.0.0.7:1"
