"""The images: what they are built from is there, and the chart names those that exist.

No engine is needed, so none is built here; hadolint's word is part of `make chart-check`.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.chart import CHART, ROOT, SERVICES, generator

DOCKERFILES = {name: ROOT / "docker" / f"{name}.Dockerfile" for name in SERVICES}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def text_of(service: str) -> str:
    return DOCKERFILES[service].read_text(encoding="utf-8")


def last_stage(service: str) -> str:
    """What the image itself is made of."""
    return text_of(service).rpartition("\nFROM ")[2]


def test_every_image_of_the_chart_has_a_dockerfile() -> None:
    """And the other way round."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    named = {values[service]["image"]["repository"] for service in SERVICES}
    made = {f"octavo-{path.stem}" for path in (ROOT / "docker").glob("*.Dockerfile")}
    assert named == made


@pytest.mark.parametrize("service", SERVICES)
def test_it_installs_the_service_at_the_pinned_versions(
    service: str, project: dict[str, Any]
) -> None:
    """With extras that there are, which for the scheduler and the gateway bring no torch."""
    (extras,) = re.findall(r'"\.\[([a-z,]+)\]"', text_of(service))
    assert extras.split(",") == [service, "otel"]
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    assert "--constraint constraints.txt" in text_of(service)


@pytest.mark.parametrize("service", SERVICES)
def test_it_runs_as_nobody_in_particular(service: str) -> None:
    """Another user than root, the one that the chart names; no probe of Docker's own."""
    stage = last_stage(service)
    user = generator().read_values().default["podSecurity"]
    assert re.findall(r"^USER (.+)$", stage, re.MULTILINE) == [
        f"{user['runAsUser']}:{user['runAsGroup']}"
    ]
    assert "\nHEALTHCHECK NONE\n" in stage
    assert stage.rstrip().endswith(f'ENTRYPOINT ["octavo", "{service}"]')


@pytest.mark.parametrize("service", SERVICES)
def test_its_bases_have_versions(service: str) -> None:
    """No image is used whose tag moves from one release to the next."""
    bases = re.findall(r"^ARG \w+_IMAGE=(\S+)$", text_of(service), re.MULTILINE)
    assert bases
    assert [base for base in bases if not re.search(r":\d+\.\d+[\w.-]*(@sha256:|$)", base)] == []


@pytest.mark.parametrize("service", SERVICES)
def test_it_has_the_projects_version(service: str, project: dict[str, Any]) -> None:
    """As the chart has."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    version = project["project"]["version"]
    assert re.findall(r"^ARG VERSION=(\S+)$", text_of(service), re.MULTILINE) == [version]
    assert chart["appVersion"] == version


def test_the_build_sees_what_the_wheel_is_made_of(project: dict[str, Any]) -> None:
    """.dockerignore lets through every package, and no more than the files named in it."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = {Path(line[1:]) for line in lines if line.startswith("!")}
    assert "*" in lines
    assert all((ROOT / path).exists() for path in let_through)
    needed = [
        *project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"],
        project["project"]["readme"],
        *project["project"]["license-files"],
        "pyproject.toml",
        "constraints.txt",
    ]
    missing = [name for name in needed if not let_through & {Path(name), *Path(name).parents}]
    assert missing == []
