"""Make an environment with octavo[scheduler] alone and show that torch is not in it.

Usage: python -P scripts/scheduler_venv.py FOLDER

Prints the environment's Python. Used by hand, by the tests and by the image of the
scheduler: the service must install, import and start where torch was never installed.
"""

from __future__ import annotations

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


if __name__ == "__main__":
    sys.stdout.write(f"{make(Path(sys.argv[1]))}\n")
