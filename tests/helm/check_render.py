"""What helm says of the chart: lint, rendering, refusals, and Kubernetes' own schemas.

Run by `make chart-check`, with every helm that it finds.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.chart import (
    CHART,
    CI_VALUES,
    NAMESPACE,
    RELEASE,
    ROOT,
    Refused,
    helms,
    one,
    render,
    run_helm,
)

KUBERNETES = ("1.30", "1.34", "1.37")
# Groups whose schemas Kubernetes has; the others are of custom resources.
BUILT_IN = {"v1", "apps/v1", "policy/v1", "autoscaling/v2", "networking.k8s.io/v1"}
TLS_SECRETS = {
    "tls.executors": {"enabled": True, "serverSecret": "a", "clientSecret": "b"},
    "tls.scheduler": {"enabled": True, "mutual": True, "serverSecret": "c", "clientSecret": "d"},
    "tls.gateway": {"enabled": True, "serverSecret": "e"},
}
KEDA = {
    "executor.autoscaling.enabled": True,
    "executor.autoscaling.prometheusAddress": "http://p:9090",
    "metrics.podMonitor.enabled": True,
}
# Ways to render that the examples do not show.
WAYS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "image-volume": {"model.source": "image", "model.image.reference": "example.com/m:1"},
    "leader-worker-set": {"executor.leaderWorkerSet.enabled": True},
    "groups": {
        "executor.leaderWorkerSet": {"enabled": True, "size": 2},
        "executor.gpu.count": 4,
    },
    "given-secrets": TLS_SECRETS,
    "ingress": {"gateway.ingress.enabled": True, "gateway.ingress.host": "llm.example.com"},
    "no-gateway": {"gateway.enabled": False},
    "no-metrics": {"metrics.enabled": False},
    "inline-keys": {"apiKeys.inline": "# none yet\n"},
    "fetch-with-token": {"model.fetch.hubTokenSecret": "t", "model.name": "org/name"},
}


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: Path(helm).name)
@pytest.mark.parametrize("file", [None, *CI_VALUES], ids=lambda file: file.stem if file else "none")
def test_lint(helm: str, file: Path | None) -> None:
    """No warning, with any example."""
    values = ["--values", str(file)] if file else []
    said = run_helm(helm, "lint", "--strict", "--kube-version", "1.34.0", str(CHART), *values)
    assert "0 chart(s) failed" in said
    assert "[WARNING]" not in said


@pytest.mark.parametrize("file", CI_VALUES, ids=lambda file: file.stem)
def test_every_helm_renders_the_same(file: Path) -> None:
    """The same objects."""
    first, *others = (render(file, helm=helm) for helm in helms())
    assert others
    assert len(first) > 10

    def key(each):
        return each["kind"], each["metadata"]["name"]

    assert all(sorted(other, key=key) == sorted(first, key=key) for other in others)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize(
    "way", [*CI_VALUES, *WAYS], ids=lambda w: w.stem if isinstance(w, Path) else w
)
def test_kubernetes_knows_every_field(way: Path | str, version: str) -> None:
    """Strictly: a field that it does not know is an error."""
    if way == "image-volume" and version == "1.30":
        with pytest.raises(Refused, match=r"needs Kubernetes 1\.33 or later"):
            render(values=WAYS["image-volume"], kube=f"{version}.0")
        return
    kube = f"{version}.0"
    objects = (
        render(way, kube=kube) if isinstance(way, Path) else render(values=WAYS[way], kube=kube)
    )
    checked = [each for each in objects if each["apiVersion"] in BUILT_IN]
    assert {each["kind"] for each in checked} >= {"Deployment", "Service", "NetworkPolicy"}
    for each in checked:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize(
    "way", [*CI_VALUES, *WAYS], ids=lambda w: w.stem if isinstance(w, Path) else w
)
def test_names_are_unique_and_labelled(way: Path | str) -> None:
    """One object of a kind and name; each says whose it is and where."""
    objects = render(way) if isinstance(way, Path) else render(values=WAYS[way])
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    assert {each["metadata"]["namespace"] for each in objects} == {NAMESPACE}
    for each in objects:
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == RELEASE
        assert len(each["metadata"]["name"]) <= 63


def test_long_names_fit() -> None:
    """The longest release that helm takes: names of services, and of pods with their hashes."""
    release = "r" * 53
    arguments = ["--namespace", NAMESPACE, "--values", str(CI_VALUES[-2])]
    for name in ("executor.leaderWorkerSet.enabled=false", "executor.leaderWorkerSet.enabled=true"):
        text = run_helm(helms()[-1], "template", release, str(CHART), *arguments, "--set", name)
        objects = [each for each in yaml.safe_load_all(text) if each]
        assert any(each["kind"] == "Certificate" for each in objects)
        for each in objects:
            assert len(each["metadata"]["name"]) <= 63
            if each["kind"] in {"StatefulSet", "LeaderWorkerSet", "Deployment"}:
                # A dash and ten characters, as a label of the pods.
                assert len(each["metadata"]["name"]) <= 63 - 11
            assert all(len(label) <= 63 for label in each["metadata"]["labels"].values())


WRONG: dict[str, tuple[str, Any]] = {
    "zero schedulers": ("scheduler.replicas", 0),
    "a number as text": ("executor.replicas", "three"),
    "an unknown value": ("scheduler.replica", 1),
    "an unknown group": ("schedular.replicas", 1),
    "an unknown setting": ("executor.config.blockSzie", 16),
    "a setting out of bounds": ("executor.config.blockSize", 4),
    "a setting of the chart's own": ("scheduler.config.listen", "0.0.0.0:1"),
    "a share above one": ("executor.autoscaling.blockUse", 1.5),
    "no such source": ("model.source", "ftp"),
    "no such policy": ("scheduler.config.policy", "random"),
    "a size without sense": ("executor.shmSize", "plenty"),
    "no time to exit": ("scheduler.exitSeconds", 0),
    "a port that there is not": ("metrics.port", 70000),
    "root": ("podSecurity.runAsUser", 0),
    "a path that is none": ("gateway.publicPaths", ["v1"]),
    "a digest that is none": ("gateway.image.digest", "latest"),
}


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: Path(helm).name)
@pytest.mark.parametrize(("name", "value"), WRONG.values(), ids=WRONG)
def test_the_schema_refuses_and_names(helm: str, name: str, value: Any) -> None:
    """Which value is wrong stands in helm's message."""
    with pytest.raises(Refused) as caught:
        render(values={name: value}, helm=helm)
    message = str(caught.value)
    assert "values don't meet the specifications" in message
    # The older helm has dots between keys and the newer one slashes; of an unknown key the group.
    path = name.split(".")
    assert path[-1] in message or path[0] in message
    assert ".".join(path[:-1]) in message.replace("/", ".")


TOGETHER: dict[str, tuple[dict[str, Any], str]] = {
    "more schedulers": ({"scheduler.replicas": 2}, "scheduler.replicas: up to 2 schedulers"),
    "schedulers that grow": ({"scheduler.autoscaling.enabled": True}, "scheduler.allowStandby"),
    "scaling by what is not requested": (
        {
            "scheduler.autoscaling": {"enabled": True, "maxReplicas": 1},
            "scheduler.resources.requests.cpu": None,
        },
        "scheduler.resources.requests.cpu",
    ),
    "ranks on CPUs": ({"device": "cpu", "executor.gpu.count": 2}, "executor.config.numThreads"),
    "pods without a group": (
        {"executor.leaderWorkerSet.size": 2},
        "executor.leaderWorkerSet.enabled",
    ),
    "volumes of a set": (
        {"executor.leaderWorkerSet.enabled": True, "model.fetch.persistence.enabled": True},
        "model.fetch.persistence.enabled",
    ),
    "no claim": ({"model.source": "pvc"}, "model.pvc.claimName"),
    "no folder": ({"model.source": "hostPath"}, "model.hostPath.path"),
    "no image": ({"model.source": "image"}, "model.image.reference"),
    "no secret": ({"tls.executors.enabled": True}, "tls.executors.serverSecret: name a secret"),
    "one of two secrets": (
        {
            "tls.executors.enabled": True,
            "tls.certManager.enabled": True,
            "tls.executors.serverSecret": "s",
        },
        "tls.executors: give serverSecret and clientSecret, or neither",
    ),
    "mutual without TLS": ({"tls.scheduler.mutual": True}, "tls.scheduler.mutual"),
    "no secret of the gateway": ({"tls.gateway.enabled": True}, "tls.gateway.serverSecret"),
    "keys twice": (
        {"apiKeys.existingSecret": "a", "apiKeys.inline": "b"},
        "apiKeys.inline: give it or",
    ),
    "a route to nowhere": ({"gateway.httpRoute.enabled": True}, "gateway.httpRoute.parentRefs"),
    "a way to no gateway": (
        {"gateway.enabled": False, "gateway.ingress.enabled": True},
        "gateway.enabled",
    ),
    "no key to test with": (
        {"gateway.enabled": False, "apiKeys.existingSecret": "a"},
        "helmTest.apiKeySecret",
    ),
    "monitors of nothing": (
        {"metrics.enabled": False, "metrics.podMonitor.enabled": True},
        "metrics.podMonitor.enabled",
    ),
    "scaling by nothing": (
        {**KEDA, "metrics.podMonitor.enabled": False},
        "executor.autoscaling.schedulerJob",
    ),
    "scaling without Prometheus": (
        {**KEDA, "executor.autoscaling.prometheusAddress": ""},
        "executor.autoscaling.prometheusAddress",
    ),
    "fewest above most": (
        {**KEDA, "executor.autoscaling.minReplicas": 9},
        "executor.autoscaling.minReplicas",
    ),
}


@pytest.mark.parametrize(("values", "message"), TOGETHER.values(), ids=TOGETHER)
def test_values_that_do_not_go_together(values: dict[str, Any], message: str) -> None:
    """The message begins with the value to change, and says what to do."""
    with pytest.raises(Refused) as caught:
        render(values=values)
    assert message in str(caught.value)


def test_an_old_kubernetes_is_refused() -> None:
    """The chart says which it needs."""
    with pytest.raises(Refused, match=r"requires kubeVersion: >=1\.30"):
        render(kube="1.29.0")


def notes(**values: Any) -> str:
    """What an install says at its end; the newer helm tells it without a cluster."""
    (helm,) = (helm for helm in helms() if run_helm(helm, "version", "--short").startswith("v4"))
    sets = [f"--set={name.replace('__', '.')}={value}" for name, value in values.items()]
    arguments = ["install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--dry-run=client"]
    return run_helm(helm, *arguments, *sets).partition("NOTES:")[2]


def test_the_notes_warn_of_what_is_open() -> None:
    """And no longer once it is closed."""
    said = notes()
    assert "no API keys" in said
    assert "without TLS" in said
    assert "may claim it" not in said
    assert "may claim it" in notes(networkPolicy__enabled="false")
    closed = notes(
        apiKeys__existingSecret="k",
        tls__executors__enabled="true",
        tls__certManager__enabled="true",
    )
    assert "WARNING" not in closed
    assert "authorization: Bearer" in closed


def test_notes_name_services_that_there_are() -> None:
    """What they say to type reaches something."""
    said = notes()
    gateway = one(render(), "Service", "-gateway")
    assert (
        f"service/{gateway['metadata']['name']} 8000:{gateway['spec']['ports'][0]['port']}" in said
    )
    host = one(render(), "Service", "-scheduler-headless")["metadata"]["name"]
    assert f"{host}.{NAMESPACE}.svc.cluster.local:50051" in said


@pytest.mark.parametrize(
    "file", sorted((ROOT / "docker").glob("*.Dockerfile")), ids=lambda f: f.stem
)
def test_dockerfiles_pass_their_linter(file: Path) -> None:
    """Without a word."""
    done = subprocess.run(
        [os.environ["OCTAVO_HADOLINT"], "--no-color", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
