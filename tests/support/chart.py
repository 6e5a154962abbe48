"""The Helm chart as its tests see it: its values, its templates, and what helm makes of it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "octavo"
CI_VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
RELEASE, NAMESPACE = "octavo", "llm"
SERVICES = ("scheduler", "executor", "gateway")

Manifest = dict[str, Any]


class Refused(Exception):
    """Helm does not render the values; the message is its own."""


@cache
def generator() -> ModuleType:
    """scripts/generate_chart.py, which is no module of a package."""
    path = ROOT / "scripts" / "generate_chart.py"
    spec = importlib.util.spec_from_file_location("generate_chart", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def templates() -> dict[str, str]:
    """The text of every template, by name."""
    folder = CHART / "templates"
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in paths}


def schema() -> dict[str, Any]:
    """values.schema.json."""
    loaded: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return loaded


def helms() -> list[str]:
    """The helms to check with: those of OCTAVO_HELM, with colons between, or the PATH's."""
    given = os.environ.get("OCTAVO_HELM", "")
    names = [name for name in given.split(os.pathsep) if name]
    if not names and (found := shutil.which("helm")):
        names = [found]
    return names


def run_helm(helm: str, *arguments: str) -> str:
    """Run helm and give what it prints.

    Raises:  Refused: with what it says, if it fails.
    """
    done = subprocess.run(
        [helm, *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "KUBECONFIG": os.devnull},
    )
    if done.returncode:
        raise Refused(done.stderr.strip())
    return done.stdout


def render(
    *files: Path, values: Mapping[str, Any] | None = None, helm: str = "", kube: str = "1.34.0"
) -> list[Manifest]:
    """Render the chart: every object, in helm's order.

    Args:
        files: of values.
        values: further ones, by dotted names; they win.
        helm: the program; "": the last of `helms()`.
        kube: Kubernetes' version, as the chart is told.
    Raises:  Refused: with helm's message.
    """
    arguments = ["template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--kube-version", kube]
    for file in files:
        arguments += ["--values", str(file)]
    for name, value in (values or {}).items():
        arguments += ["--set-json", f"{name}={json.dumps(value)}"]
    text = run_helm(helm or helms()[-1], *arguments)
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def one(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    """The one object of this kind, and with this end of its name."""
    (found,) = [
        each
        for each in manifests
        if each["kind"] == kind and each["metadata"]["name"].endswith(name)
    ]
    return found


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Every pod's spec, by the component it is."""
    found: dict[str, Manifest] = {}
    for manifest in manifests:
        spec = manifest.get("spec", {})
        if manifest["kind"] in {"Deployment", "StatefulSet"}:
            templates = [spec["template"]]
        elif manifest["kind"] == "LeaderWorkerSet":
            kinds = ("leaderTemplate", "workerTemplate")
            group = spec["leaderWorkerTemplate"]
            templates = [group[kind] for kind in kinds if kind in group]
        elif manifest["kind"] == "Pod":
            templates = [manifest]
        else:
            continue
        for template in templates:
            labels = template["metadata"]["labels"]
            found[labels["app.kubernetes.io/component"]] = template["spec"]
    return found


def containers(pod: Manifest) -> list[Manifest]:
    """A pod's containers, those of its start too."""
    return [*pod.get("initContainers", ()), *pod["containers"]]


def environment(container: Manifest) -> dict[str, str]:
    """The variables of a container that have a plain value."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def references(text: str, of: str = r"\.Values") -> Iterator[str]:
    """Yield what a template reads below .Values, or another variable, by its dotted name."""
    for match in re.finditer(of + r"\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)", text):
        yield match[1]
