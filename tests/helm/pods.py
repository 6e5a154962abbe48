"""The pods that a cluster's controllers would make of rendered objects, and what they name."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.helm.cert_manager import Secret
from tests.helm.dockerfile import Image, read_image
from tests.support.chart import NAMESPACE, Manifest


@dataclass
class Pod:
    """One pod.

    Attributes:
        part: its component, such as "executor".
        ports: by the container's port, the one of loopback that stands for it.
        volumes: folder of each, by name.
        added: variables that a controller of the cluster adds.
    """

    name: str
    part: str
    labels: dict[str, str]
    spec: Manifest
    ports: dict[int, int] = field(default_factory=dict)
    volumes: dict[str, Path] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)


def pods_of(objects: list[Manifest], copies: Mapping[str, int]) -> Iterator[Pod]:
    """Make every pod that controllers would, but of each component as many as asked, or one."""
    for each in objects:
        name, spec = each["metadata"]["name"], each.get("spec", {})
        if each["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            first = group.get("leaderTemplate", group["workerTemplate"])
            shared = {"LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_GROUP_SIZE": str(group["size"])}
            for index in range(group["size"]):
                pod = _pod(f"{name}-0-{index}", group["workerTemplate"] if index else first)
                pod.added = {**shared, "LWS_WORKER_INDEX": str(index)}
                yield pod
        elif each["kind"] in {"Deployment", "StatefulSet", "Pod"}:
            template = spec.get("template", each)
            part = _pod(name, template).part
            for number in range(copies.get(part, 1)):
                yield _pod(f"{name}-{number}", template)


def _pod(name: str, template: Manifest) -> Pod:
    labels = template["metadata"]["labels"]
    return Pod(name, labels["app.kubernetes.io/component"], labels, template["spec"])


def filled_in(text: str, variables: Mapping[str, str]) -> str:
    """Replace $(NAME); one that is not known stays as it is."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


def rendered_secrets(objects: list[Manifest]) -> dict[str, Secret]:
    return {
        each["metadata"]["name"]: {
            key: base64.b64decode(value) for key, value in each["data"].items()
        }
        for each in objects
        if each["kind"] == "Secret"
    }


def write_secret(folder: Path, secret: Secret, volume: Mapping[str, Any]) -> None:
    """Write a secret's files, all or the items of a volume."""
    folder.mkdir(parents=True, exist_ok=True)
    items = volume.get("items") or [{"key": key, "path": key} for key in secret]
    for item in items:
        path = folder / item["path"]
        path.write_bytes(secret[item["key"]])
        path.chmod(volume.get("defaultMode", 0o644))


def image_of(container: Manifest) -> Image:
    """The image that a container names."""
    match = re.search(r"octavo-(\w+)[:@](\S+)$", container["image"])
    assert match is not None, f"{container['image']}: built from none of docker/"
    return read_image(match[1], DEVICE="cpu" if match[2].endswith("-cpu") else "gpu")


def host_of(service: Manifest) -> str:
    return f"{service['metadata']['name']}.{NAMESPACE}.svc.cluster.local"


def quantity(text: str | int) -> float:
    """Kubernetes' way to write a number, as far as CPUs go: 4, 0.5, 500m."""
    word = str(text)
    return float(word[:-1]) / 1000 if word.endswith("m") else float(word)
