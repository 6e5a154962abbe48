"""The ways in: make's targets, setup's first words, and the dependencies."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# In code only: a line that starts with it, or `make …`.
MAKE_COMMAND = re.compile(r"(?:^\s*(?:\$ )?|`)make +([a-z][a-z-]*)", re.MULTILINE)


@pytest.fixture(scope="module")
def targets(root) -> set[str]:
    text = (root / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def requirements(root) -> list[Requirement]:
    """Every direct dependency, of the client and of each extra."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    return [each for each in map(Requirement, lines) if each.name != "octavo"]


@pytest.fixture(scope="module")
def pins(root) -> dict[str, str]:
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return dict(pairs)


def test_documents_name_only_targets_that_exist(files, root, targets):
    """What a reader types works."""
    for path in (path for path in files if path.suffix == ".md"):
        named = set(MAKE_COMMAND.findall(path.read_text(encoding="utf-8")))
        assert named <= targets, path.relative_to(root)


def test_make_alone_lists_every_target(root, targets):
    """Nobody has to read the Makefile to use it."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(
        ["make"], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    listed = set(re.findall(r"^  make ([a-z-]+) +\S", done.stdout, re.MULTILINE))
    assert listed == targets


def test_setup_refuses_a_python_that_is_too_old(root, tmp_path):
    """One line that says which Python is needed and how to give it; nothing is made."""
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(old), "VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        ["bash", "scripts/setup.sh"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "3.11 to 3.13" in done.stderr
    assert "make setup PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_every_dependency_is_pinned_to_a_version_it_allows(requirements, pins):
    """After a change of pyproject.toml: `make pin`."""
    assert requirements
    wrong = [
        str(requirement)
        for requirement in requirements
        if not requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == []


def test_pins_are_names_and_versions_only(root):
    """No address, path or local build label ties the pins to one machine."""
    lines = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert pinned == sorted(pinned)
    odd = [line for line in pinned if not re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line)]
    assert odd == []


def test_every_dependency_is_accounted_for(root, requirements):
    """docs/dependencies.md says of each what it is for and under which licence."""
    text = (root / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))
    needed = {canonicalize_name(requirement.name) for requirement in requirements}
    assert needed - rows == set()
    assert rows - needed == set()
