"""Who may import whom, and what the repository's folders are to Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(sys.executable).parent


def test_the_import_rules_hold(root):
    """The contracts of pyproject.toml, checked by import-linter itself."""
    done = subprocess.run(
        [TOOLS / "lint-imports", "--no-cache"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.parametrize(
    "folder", ["kernels", "proto", "clients", "clients/python", "clients/gateway"]
)
def test_source_roots_are_not_packages(root, folder):
    """A package "kernels" or "proto" would shadow libraries that others depend on."""
    assert (root / folder).is_dir()
    assert not (root / folder / "__init__.py").exists()


@pytest.mark.parametrize("name", ["kernels", "proto"])
def test_a_source_root_cannot_be_imported_by_its_folders_name(root, name):
    """Not even as a namespace package: the repository root is not on the path."""
    program = (
        "from importlib.util import find_spec;"
        f"spec = find_spec({name!r});"
        "print(*(spec.submodule_search_locations or []) if spec else [])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    assert str(root) not in done.stdout
