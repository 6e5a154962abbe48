"""The steps by which images are made, carried out without an engine: install, start, end.

What .dockerignore lets through is copied, the RUN steps of the stage "build" are run on it, and
the ENTRYPOINT is started with the image's variables; /opt/octavo is a temporary folder. Run by
`make chart-check`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from octavo_client._process import tail
from octavo_client._socket import settle_address

from executor_svc.config import ExecutorConfig
from executor_svc.model_store import resolve
from tests.helm.dockerfile import Image, read_image
from tests.support.chart import ROOT

PREFIX = "/opt/octavo"
INSTALL_SECONDS = 900
START_SECONDS = 60.0
END_SECONDS = 30.0
MAX_BYTES = 200_000_000
NOT_THERE = ("torch", "triton", "transformers", "numpy", "pip")
MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Installed:
    """An image's folder, and how its processes are started."""

    service: str
    image: Image
    folder: Path
    home: Path

    @property
    def variables(self) -> dict[str, str]:
        """Those of the image, with this machine's folders."""
        told = {name: self._here(text) for name, text in self.image.variables.items()}
        return {**told, "HOME": str(self.home)}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as a container would, to its end."""
        return subprocess.run(
            command, env=self.variables, cwd=self.image.workdir, capture_output=True, text=True,
            check=False, timeout=START_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def start(self, log: Path, **settings: str) -> subprocess.Popen[bytes]:
        """Start the entrypoint, with these settings of the service."""
        prefix = f"OCTAVO_{self.service.upper()}_"
        told = {prefix + name: value for name, value in settings.items()}
        with log.open("wb") as file:
            return subprocess.Popen(
                self.image.entrypoint, env={**self.variables, **told}, cwd=self.image.workdir,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip

    def _here(self, text: str) -> str:
        return text.replace(PREFIX, str(self.folder))


def let_through() -> Iterator[Path]:
    """What .dockerignore lets into a build, by its last rule that fits; relative to the root."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    written = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    rules = [(line.startswith("!"), _pattern(line.lstrip("!"))) for line in written]
    kept = [line[1:] for line in written if line.startswith("!")]

    def is_in(path: str) -> bool:
        found = True
        for is_kept, pattern in rules:
            if pattern.match(path):
                found = is_kept
        return found

    for folder, folders, files in os.walk(ROOT):
        below = Path(folder).relative_to(ROOT).as_posix()
        prefix = "" if below == "." else f"{below}/"
        yield from (Path(prefix + name) for name in files if is_in(prefix + name))
        folders[:] = [
            name
            for name in folders
            if is_in(prefix + name) or any(line.startswith(f"{prefix}{name}/") for line in kept)
        ]


def _pattern(line: str) -> re.Pattern[str]:
    """A rule fits a path, and all below it."""
    parts = re.split(r"(\*\*/|\*)", line)
    ways = {"**/": "(?:.*/)?", "*": "[^/]*"}
    return re.compile("".join(ways.get(part, re.escape(part)) for part in parts) + "(?:/|$)")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build sees."""
    folder = tmp_path_factory.mktemp("context")
    for path in let_through():
        (folder / path.parent).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)
    return folder


@pytest.fixture(scope="module", params=["scheduler", "gateway"])
def installed(
    request: pytest.FixtureRequest, context: Path, tmp_path_factory: pytest.TempPathFactory
) -> Installed:
    """An image's folder, made by its own steps."""
    folder = tmp_path_factory.mktemp(request.param)
    image = read_image(request.param)
    for step in image.installs:
        done = carry_out(step, image, context, folder / "octavo")
        assert done.returncode == 0, done.stdout
    (folder / "home").mkdir()
    return Installed(request.param, image, folder / "octavo", folder / "home")


def carry_out(
    step: str, image: Image, context: Path, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a RUN step. Where packages come from (PIP_…) is this machine's matter."""
    own = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH"}}
    python = Path(sys.executable).parent
    path = {"PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", step.replace(PREFIX, str(folder))],
        env={**own, **image.install_variables, **path},
        cwd=context,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=INSTALL_SECONDS,
    )


@pytest.mark.timeout(INSTALL_SECONDS)
def test_the_executors_packages_can_be_had(context: Path, tmp_path: Path) -> None:
    """All of them, at the pinned versions; to install torch each time would take too long."""
    image = read_image("executor")
    (step,) = image.installs
    resolved = step.replace("pip install", "pip install --dry-run")
    done = carry_out(resolved, image, context, tmp_path / "octavo")
    assert done.returncode == 0, done.stdout
    (would,) = re.findall(r"^Would install (.+)$", done.stdout, re.MULTILINE)
    found = {name.lower() for name in re.findall(r"(\S+)-\d\S*", would)}
    assert {"octavo", "torch", "transformers", "safetensors", "opentelemetry-sdk"} <= found


def test_a_build_sees_the_project_and_no_more(context: Path) -> None:
    """No caches, no tests, no environment, nothing that only lies about."""
    seen = {path.relative_to(context).as_posix() for path in context.rglob("*") if path.is_file()}
    assert {"pyproject.toml", "constraints.txt", "scheduler_svc/__main__.py"} <= seen
    assert not [path for path in seen if path.startswith((".", "tests/", "docs/", "clients/node"))]
    assert not [path for path in seen if "__pycache__" in path or path.endswith(".pyc")]


@pytest.mark.timeout(INSTALL_SECONDS)
def test_it_has_what_it_needs_and_no_torch(installed: Installed) -> None:
    """The code of the build, not of this checkout; telemetry; nothing that is large."""
    program = (
        "import importlib.util as u, octavo_client, sys; print(octavo_client.__file__);"
        "print(*[name for name in sys.argv[1:] if u.find_spec(name)])"
    )
    wanted = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
    done = installed.run("python", "-c", program, *NOT_THERE, *wanted)
    assert done.returncode == 0, done.stderr
    file, found = done.stdout.splitlines()
    assert Path(file).is_relative_to(installed.folder)
    assert found.split() == list(wanted)
    files = (path for path in installed.folder.rglob("*") if path.is_file())
    assert sum(path.lstat().st_size for path in files) < MAX_BYTES


def test_its_entrypoint_explains_itself(installed: Installed) -> None:
    """As `docker run IMAGE --help` would."""
    done = installed.run(*installed.image.entrypoint, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: octavo {installed.service}" in done.stdout
    assert "--listen" in done.stdout


def test_its_probe_runs(installed: Installed) -> None:
    """And fails where nothing answers, with one line."""
    done = installed.run("python", "-P", "-m", "octavo.probe", settle_address("127.0.0.1:0", ""))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("octavo.probe: 127.0.0.1:")


def test_it_starts_and_ends(installed: Installed, tmp_path: Path) -> None:
    """Without an executor or a scheduler to be found; SIGTERM ends it with status 0."""
    store = ExecutorConfig().model_store
    resolve(MODEL, store)
    listen = settle_address("127.0.0.1:0", "LISTEN")
    settings = {"MODEL_STORE": str(store.expanduser())} if installed.service == "scheduler" else {}
    log = tmp_path / "log"
    process = installed.start(log, LISTEN=listen, **settings)
    try:
        give_up = time.monotonic() + START_SECONDS
        while f"{installed.service}_started" not in log.read_text(encoding="utf-8"):
            assert process.poll() is None and time.monotonic() < give_up, tail(log)
            time.sleep(0.1)
        if installed.service == "scheduler":
            done = installed.run("python", "-m", "octavo.probe", listen)
            assert (done.returncode, done.stderr.split()[-1]) == (1, "NOT_SERVING")
        else:
            answer = httpx.get(f"http://{listen}/version", trust_env=False)
            assert answer.status_code == httpx.codes.OK
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECONDS) == 0, tail(log)
    finally:
        process.kill()
        process.wait()
