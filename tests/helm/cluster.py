"""A cluster of one machine: the pods of a rendered chart as processes on loopback.

What a process is told, its command and every variable, is what the chart renders and its
Dockerfile sets, and nothing of this machine's own; RULES has all that is put in place of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from octavo_client._process import tail
from octavo_client._socket import settle_address

from tests.helm.cert_manager import Secret, issue
from tests.helm.pods import (
    Pod,
    filled_in,
    host_of,
    image_of,
    pods_of,
    quantity,
    rendered_secrets,
    write_secret,
)
from tests.support.chart import Manifest

_RUN_SECONDS = 600.0
_KILL_SECONDS = 10.0
_LINES = 20


class Rule(NamedTuple):
    """What is put in place of something, and why."""

    what: str
    instead: str
    why: str


RULES = {
    "port": Rule(
        "0.0.0.0:PORT of a pod, and 127.0.0.1:PORT in its probes",
        "127.0.0.1 and a free port",
        "pods have an address each and share this machine's, where nobody else should reach them",
    ),
    "service": Rule(
        "HOST:PORT of a Service",
        "localhost and the port of each pod that the Service selects",
        "there is no DNS; the Service's name, selector and ports are followed as a cluster would",
    ),
    "outside": Rule(
        "HOST:PORT of what the chart does not install, such as a collector",
        "HOST:PORT of the test's own",
        "it is not here",
    ),
    "folder": Rule(
        "a path in a mounted volume",
        "the same path in a temporary folder",
        "each container has a root of its own, this machine has one",
    ),
    "models": Rule(
        "a volume of models, empty or claimed",
        "a folder with the local store's model",
        "270 MB need not be fetched for each pod; the init containers run, and find it",
    ),
    "image": Rule(
        "/opt/octavo/bin of the images",
        "the bin folder of this environment",
        "no images are built here; check_images_install.py replays what is installed in them",
    ),
}
_IMAGE_BIN = "/opt/octavo/bin"


@dataclass
class Process:
    """The main container of a pod, running."""

    pod: Pod
    container: Manifest
    environment: dict[str, str]
    child: subprocess.Popen[bytes]
    log: Path

    @property
    def has_ended(self) -> bool:
        return self.child.poll() is not None

    def port(self, port: int | str) -> int:
        """Loopback's for one of the container's, by number or name."""
        named = {each["name"]: each["containerPort"] for each in self.container["ports"]}
        return self.pod.ports[named[port] if isinstance(port, str) else port]

    def tail(self) -> str:
        """The end of its log, to explain a failure."""
        return "\n".join([f"{self.pod.name}:", *tail(self.log, _LINES)])


class Cluster:
    """Pods of rendered objects; when its block is left none of their processes runs.

    Attributes:
        pods: by component and number, such as "executor-0".
        secrets: those rendered, those of Certificates, and those given.
        used: names of the rules that were applied.
    """

    def __init__(
        self,
        objects: list[Manifest],
        folder: Path,
        *,
        model: Path,
        copies: Mapping[str, int] | None = None,
        secrets: Mapping[str, Secret] | None = None,
        outside: Mapping[str, str] | None = None,
    ) -> None:
        """Take the objects; nothing runs yet.

        Args:
            objects: all that helm rendered.
            folder: for volumes and logs; made if it is not there.
            model: the model's folder.
            copies: pods of a component; one of each that is not named.
            secrets: those that an administrator makes before he installs the chart.
            outside: HOST:PORT by the HOST:PORT that it stands for.
        """
        self.objects = objects
        self.used: set[str] = set()
        self.secrets = {**rendered_secrets(objects), **issue(objects), **(secrets or {})}
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._model = model
        self._outside = dict(outside or {})
        self._processes: list[Process] = []
        self.pods: dict[str, Pod] = {}
        for pod in pods_of(objects, copies or {}):
            for port in pod.spec["containers"][0].get("ports", ()):
                free = settle_address("127.0.0.1:0", port["name"])
                pod.ports[port["containerPort"]] = int(free.rpartition(":")[2])
            number = sum(other.part == pod.part for other in self.pods.values())
            self.pods[f"{pod.part}-{number}"] = pod

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.child.pid, signal.SIGKILL)  # and what it started
        for process in self._processes:
            process.child.wait(_KILL_SECONDS)
        if error is not None:
            error.add_note("\n\n".join(process.tail() for process in self._processes))

    def start(self, name: str) -> Process:
        """Run a pod's init containers to their ends, then start its container.

        Raises:  AssertionError: if an init container fails, with what it said.
        """
        pod = self.pods[name]
        for container in pod.spec.get("initContainers", ()):
            done = self.run(pod, container)
            assert done.returncode == 0, f"{pod.name}, {container['name']}: {done.stdout}"
        (container,) = pod.spec["containers"]
        environment = self.environment(pod, container)
        log = self._folder / f"{pod.name}.log"
        with log.open("wb") as file:
            child = subprocess.Popen(
                self._command(pod, container),
                env=environment,
                cwd=image_of(container).workdir,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._processes.append(Process(pod, container, environment, child, log))
        return self._processes[-1]

    def run(self, pod: Pod, container: Manifest) -> subprocess.CompletedProcess[str]:
        """Run a container to its end; what it says is in `stdout`."""
        command = self._command(pod, container)
        return self._run(pod, container, command, _RUN_SECONDS)

    def execute(
        self, process: Process, command: list[str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, as an exec probe does.

        Raises:  subprocess.TimeoutExpired: if it takes longer.
        """
        words = [self._word(word, process.pod, process.container) for word in command]
        return self._run(process.pod, process.container, words, seconds)

    def _run(
        self, pod: Pod, container: Manifest, command: list[str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment(pod, container),
            cwd=image_of(container).workdir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=seconds,
        )

    def url(self, part: str, scheme: str = "") -> str:
        """Where a client of this machine reaches a component, by its Service."""
        (service,) = [
            each
            for each in self.objects
            if each["kind"] == "Service" and each["metadata"]["name"].endswith(f"-{part}")
        ]
        port = service["spec"]["ports"][0]["port"]
        (local,) = self._ports_behind(service, port)
        return f"{scheme}localhost:{local}"

    def secret_folder(self, name: str) -> Path:
        """Write a secret's files, for who is not in a pod."""
        folder = self._folder / "secrets" / name
        write_secret(folder, self.secrets[name], {})
        return folder

    # -- what a container is told ------------------------------------------------------

    def environment(self, pod: Pod, container: Manifest) -> dict[str, str]:
        """Its image's variables, those that a controller adds, and its own."""
        told = {**image_of(container).variables, **self._variables(pod, container)}
        return {name: self._word(text, pod, container) for name, text in told.items()}

    def _variables(self, pod: Pod, container: Manifest) -> dict[str, str]:
        """Those of the pod, as they are rendered; one is filled in by those before it."""
        found = dict(pod.added)
        for each in container.get("env", ()):
            text = each["value"] if "value" in each else self._looked_up(pod, container, each)
            found[each["name"]] = filled_in(text, found)
        return found

    def _looked_up(self, pod: Pod, container: Manifest, variable: Manifest) -> str:
        ((kind, source),) = variable["valueFrom"].items()
        if kind == "fieldRef":
            return {"metadata.name": pod.name, "status.podIP": "127.0.0.1"}[source["fieldPath"]]
        if kind == "secretKeyRef":
            return self.secrets[source["name"]][source["key"]].decode()
        assert kind == "resourceFieldRef", f"{variable['name']}: {kind} is not known here"
        group, _, resource = source["resource"].partition(".")
        given = container.get("resources", {}).get(group, {}).get(resource)
        return str(os.cpu_count() if given is None else math.ceil(quantity(given)))

    def _command(self, pod: Pod, container: Manifest) -> list[str]:
        entrypoint = container.get("command") or image_of(container).entrypoint
        variables = self._variables(pod, container)
        words = [filled_in(word, variables) for word in [*entrypoint, *container.get("args", ())]]
        return [self._word(word, pod, container) for word in words]

    def _word(self, text: str, pod: Pod, container: Manifest) -> str:
        """Apply the rules to one word of a command or one variable's text."""
        services = {host_of(each): each for each in self.objects if each["kind"] == "Service"}
        folders = self._folders(pod, container)
        ways = {
            "service": rf"(?P<scheme>[a-z]+:/+)?{_any(services)}:(?P<service_port>\d+)",
            "port": r"(?:0\.0\.0\.0|\[::\]|127\.0\.0\.1):(?P<own_port>\d+)",
            "outside": _any(self._outside) if self._outside else r"(?!)",
            "folder": rf"(?<![\w./-]){_any(folders)}(?![\w.-])",
        }
        pattern = "|".join(f"(?P<{name}>{way})" for name, way in ways.items())

        def instead(match: re.Match[str]) -> str:
            rule = next(name for name in ways if match[name])
            self.used.add("image" if match[rule] == _IMAGE_BIN else rule)
            if rule == "service":
                scheme = match["scheme"] or ""
                host = match["service"].removeprefix(scheme).rpartition(":")[0]
                ports = self._ports_behind(services[host], int(match["service_port"]))
                return ",".join(f"{scheme}localhost:{port}" for port in ports)
            if rule == "port":
                return f"127.0.0.1:{pod.ports[int(match['own_port'])]}"
            return self._outside[match[rule]] if rule == "outside" else folders[match[rule]]

        return re.sub(pattern, instead, text)

    def _ports_behind(self, service: Manifest, port: int) -> list[int]:
        """Ports of loopback that a connection to a service's port ends at, one for each pod."""
        spec = service["spec"]
        (entry,) = [each for each in spec["ports"] if each["port"] == port]
        found = []
        for pod in self.pods.values():
            if not spec["selector"].items() <= pod.labels.items():
                continue
            ports = pod.spec["containers"][0].get("ports", ())
            named = {each["name"]: each["containerPort"] for each in ports}
            # Without an address of its own it only gives those of pods: no port is translated.
            target = port if spec.get("clusterIP") == "None" else entry["targetPort"]
            found.append(pod.ports[named.get(target, target)])
        assert found, f"{service['metadata']['name']} selects no pod"
        return found

    def _folders(self, pod: Pod, container: Manifest) -> dict[str, str]:
        """By path in the container, the one that stands for it."""
        folders = {_IMAGE_BIN: str(Path(sys.executable).parent)}
        for mount in container.get("volumeMounts", ()):
            folder = self._volume(pod, mount["name"]) / mount.get("subPath", "")
            folders[mount["mountPath"]] = str(folder)
        return folders

    def _volume(self, pod: Pod, name: str) -> Path:
        if name not in pod.volumes:
            (volume,) = [each for each in pod.spec["volumes"] if each["name"] == name]
            folder = pod.volumes[name] = self._folder / pod.name / name
            if secret := volume.get("secret"):
                write_secret(folder, self.secrets[secret["secretName"]], secret)
                return folder
            folder.mkdir(parents=True)
            if name == "models":
                self.used.add("models")
                (folder / self._model.name).symlink_to(self._model)
            else:
                assert "emptyDir" in volume, f"{pod.name}: no volume {volume} is known here"
        return pod.volumes[name]


def interrupt(process: Process) -> None:
    """Tell a process to end, as a kubelet does."""
    process.child.send_signal(signal.SIGTERM)


def _any(words: Iterable[str]) -> str:
    """A pattern for any of these, the longest first."""
    return "(?:" + "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) + ")"
