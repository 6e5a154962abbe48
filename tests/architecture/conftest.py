"""The project's own files, as every check here sees them."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_NOT_OURS = {".git", ".venv", "node_modules", "build", "dist", "__pycache__"}


@cache
def own_files() -> list[Path]:
    """Everything committed or about to be: what git does not ignore."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode == 0:
        paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    else:  # an unpacked archive
        paths = [path for path in ROOT.rglob("*") if not _NOT_OURS & set(path.parts)]
    return sorted(path for path in paths if path.is_file())


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Path]:
    return own_files()


@pytest.fixture(scope="session")
def python_files(files) -> list[Path]:
    """Python written by hand."""
    return [
        path
        for path in files
        if path.suffix == ".py" and not path.stem.endswith(("_pb2", "_pb2_grpc"))
    ]
