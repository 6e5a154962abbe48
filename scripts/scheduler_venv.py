"""Make an environment with octavo[scheduler] alone, and start the scheduler in it.

Usage: python -P scripts/scheduler_venv.py FOLDER

The service must install, import, start and end where torch was never installed. Prints
the environment's Python. `make scheduler-alone` runs it in a temporary folder.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = ("torch", "triton", "transformers", "numpy")


def make(folder: Path) -> Path:
    """Install octavo[scheduler] at the pinned versions; give the environment's Python.

    Raises:  subprocess.CalledProcessError: if pip fails; its output is on stderr.
             RuntimeError: if something forbidden can be imported there.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = str(ROOT / "constraints.txt")
    subprocess.run(
        [*pip, "-c", constraints, f"{ROOT}[scheduler]"], check=True, stdin=subprocess.DEVNULL
    )
    for name in FORBIDDEN:
        program = (
            f"from importlib.util import find_spec; raise SystemExit(bool(find_spec('{name}')))"
        )
        if subprocess.run([str(python), "-P", "-c", program], check=False).returncode != 0:
            raise RuntimeError(f"octavo[scheduler] brought {name} with it")
    return python


def start(python: Path) -> None:
    """Start the scheduler there, wait until it listens, and drain it.

    Raises:  RuntimeError: if it does not start, or does not end with status 0.
    """
    command = [str(python), "-P", "-m", "scheduler_svc", "--listen", "127.0.0.1:0"]
    service = subprocess.Popen(
        [*command, "--log-format", "json"], stderr=subprocess.PIPE, text=True, cwd="/"
    )
    assert service.stderr is not None
    seen: list[str] = []
    for line in service.stderr:
        seen.append(line)
        if "scheduler_started" in line:
            service.send_signal(signal.SIGTERM)
    if service.wait(timeout=60) != 0 or not any("scheduler_started" in line for line in seen):
        raise RuntimeError("the scheduler did not start and end: " + "".join(seen[-5:]))


if __name__ == "__main__":
    made = make(Path(sys.argv[1]))
    start(made)
    sys.stdout.write(f"{made}\n")
