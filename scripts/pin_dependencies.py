"""Write constraints.txt: what is installed now, for every extra of octavo.

Usage: python -P scripts/pin_dependencies.py [OUTPUT]

Run it with the environment's Python after an upgrade that passed the tests. Only
packages that some extra of octavo reaches are pinned; local labels such as "+cpu" are
dropped, so that the pins hold for every build of the same release.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HEADER = """\
# What Octavo was last tested with. Written by scripts/pin_dependencies.py.
# Use: pip install -c constraints.txt -e ".[dev]"
"""

# torch's CUDA build, which PyPI serves on Linux, asks for exactly one Triton. Its CPU
# build asks for none, so an environment with that one does not say which.
# Source: the metadata of torch 2.13.0.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}


def installed_closure(root: str, extra: str) -> dict[str, str]:
    """Name and version of everything installed that root[extra] reaches, without root."""
    pins: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(canonicalize_name(root), extra)]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue  # for another platform or Python
        if name != canonicalize_name(root):
            pins[name] = Version(package.version).public
        for line in package.requires or []:
            requirement = Requirement(line)
            if requirement.marker and not requirement.marker.evaluate({"extra": wanted}):
                continue
            extras = {"", *requirement.extras}
            todo += [(canonicalize_name(requirement.name), each) for each in sorted(extras)]
    return pins


def main(output: Path) -> None:
    """Write the pins, one a line, sorted."""
    pins = installed_closure("octavo", "dev")
    if pins["torch"] in TRITON_OF_TORCH:
        pins["triton"] = TRITON_OF_TORCH[pins["torch"]]
    lines = sorted(f"{name}=={version}\n" for name, version in pins.items())
    output.write_text(HEADER + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    default = Path(__file__).resolve().parent.parent / "constraints.txt"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
