"""What the rendered objects promise: who reaches what, how pods end, what they may do.

Run by `make chart-check`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import (
    CI_VALUES,
    SERVICES,
    Manifest,
    containers,
    environment,
    one,
    pods,
    render,
)

EXAMPLES = {file.stem.removesuffix("-values"): file for file in CI_VALUES}
PRODUCTION = EXAMPLES["production"]


@cache
def example(name: str) -> tuple[Manifest, ...]:
    return tuple(render(EXAMPLES[name]))


def every_pod() -> list[tuple[str, str]]:
    return [(name, part) for name in EXAMPLES for part in pods(list(example(name)))]


def of_kind(objects: Any, kind: str) -> list[Manifest]:
    return [each for each in objects if each["kind"] == kind]


def labels_of(objects: Any, part: str) -> dict[str, str]:
    """The labels of a component's pods."""
    for each in objects:
        template = each.get("spec", {}).get("template", {})
        labels = template.get("metadata", {}).get("labels", {})
        if labels.get("app.kubernetes.io/component") == part:
            return dict(labels)
    raise AssertionError(f"no pods of {part}")


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()


# -- what pods may do ------------------------------------------------------------------


@pytest.mark.parametrize(("name", "part"), every_pod())
def test_pods_are_restricted(name: str, part: str) -> None:
    """As the pod security standard "restricted" asks, whose fields these are."""
    pod = pods(list(example(name)))[part]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for container in containers(pod):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not any("hostPort" in port for port in container.get("ports", ()))
    allowed = {"emptyDir", "secret", "persistentVolumeClaim", "image"}
    if name == "eight-gpu-node":
        allowed.add("hostPath")  # which its file says
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= allowed


@pytest.mark.parametrize(("name", "part"), every_pod())
def test_pods_have_no_token_and_no_foreign_variables(name: str, part: str) -> None:
    """No access to the API server; no OCTAVO_SCHEDULER_PORT from Kubernetes."""
    pod = pods(list(example(name)))[part]
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    accounts = of_kind(example(name), "ServiceAccount")
    assert all(account["automountServiceAccountToken"] is False for account in accounts)
    assert pod["serviceAccountName"] in {each["metadata"]["name"] for each in accounts}


def test_a_cluster_may_choose_the_users() -> None:
    """As OpenShift does: null leaves the fields out."""
    values = {f"podSecurity.{key}": None for key in ("runAsUser", "runAsGroup", "fsGroup")}
    for pod in pods(render(values=values)).values():
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod["securityContext"].keys()
        assert pod["securityContext"]["runAsNonRoot"] is True


def test_a_new_version_of_the_chart_alone_restarts_nothing() -> None:
    """No version stands in a pod's template, but for the image's tag."""
    for each in example("production"):
        template = each.get("spec", {}).get("template")
        if template is not None:
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(
                template["metadata"]["labels"]
            )


def test_nothing_grants_rights() -> None:
    """No role, no binding."""
    for name in EXAMPLES:
        kinds = {each["kind"] for each in example(name)}
        assert not any("Role" in kind for kind in kinds)


@pytest.mark.parametrize(("name", "part"), every_pod())
def test_every_mount_has_its_volume_and_every_volume_its_mount(name: str, part: str) -> None:
    """Secrets are mounted as folders, so that renewed ones arrive."""
    pod = pods(list(example(name)))[part]
    claims = [
        claim["metadata"]["name"]
        for each in of_kind(example(name), "StatefulSet")
        for claim in each["spec"].get("volumeClaimTemplates", ())
        if part == "executor"
    ]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = [mount for each in containers(pod) for mount in each["volumeMounts"]]
    assert len(volumes) == len(pod["volumes"])
    assert {mount["name"] for mount in mounts} == volumes.keys() | set(claims)
    for each in containers(pod):
        places = [mount["mountPath"] for mount in each["volumeMounts"]]
        assert len(set(places)) == len(places)
    secret = {key for key, volume in volumes.items() if "secret" in volume}
    assert not any("subPath" in mount for mount in mounts if mount["name"] in secret)
    assert all(mount["readOnly"] for mount in mounts if mount["name"] in secret)


@pytest.mark.parametrize(("name", "part"), every_pod())
def test_there_is_a_place_to_write(name: str, part: str) -> None:
    """The images' HOME is /tmp, under a read-only root."""
    for container in containers(pods(list(example(name)))[part]):
        writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
        assert "/tmp" in writable
        cache_folders = {"XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR"}
        for key, value in environment(container).items():
            assert key not in cache_folders or value.startswith("/tmp/")


# -- who reaches what ------------------------------------------------------------------


def test_executors_are_reached_by_schedulers_alone() -> None:
    """And their metrics by monitoring alone."""
    objects = example("production")
    policy = one(list(objects), "NetworkPolicy", "-executor")["spec"]
    assert "Ingress" in policy["policyTypes"]
    assert selects(policy["podSelector"]["matchLabels"], labels_of(objects, "executor"))
    for part in ("scheduler", "gateway"):
        assert not selects(policy["podSelector"]["matchLabels"], labels_of(objects, part))
    grpc, metrics = policy["ingress"]
    (peer,) = grpc["from"]
    assert peer.keys() == {"podSelector"}  # of this namespace
    assert selects(peer["podSelector"]["matchLabels"], labels_of(objects, "scheduler"))
    assert not selects(peer["podSelector"]["matchLabels"], labels_of(objects, "gateway"))
    assert grpc["ports"] == [{"port": "grpc"}]
    assert metrics["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    ]
    assert metrics["ports"] == [{"port": "metrics"}]


def test_executors_reach_little() -> None:
    """DNS and the collector; port 443 only where they fetch the model themselves."""

    def ports(objects: Any) -> set[int]:
        policy = one(list(objects), "NetworkPolicy", "-executor")["spec"]
        assert "Egress" in policy["policyTypes"]
        return {port["port"] for rule in policy["egress"] for port in rule["ports"]}

    assert ports(example("production")) == {53, 4317}
    assert ports(example("single-gpu")) == {53, 443}
    assert ports(example("eight-gpu-node")) == {53}
    other = render(values={"telemetry.endpoint": "https://c.example:14317"})
    assert ports(other) == {53, 443, 14317}


def test_schedulers_metrics_are_for_monitoring() -> None:
    """The public port is open to all, or to those named and the gateway."""
    rules = one(list(example("production")), "NetworkPolicy", "-scheduler")["spec"]["ingress"]
    assert rules[0] == {"ports": [{"port": "grpc"}]}
    assert rules[1]["ports"] == [{"port": "metrics"}]
    assert rules[1]["from"]
    peer = {"namespaceSelector": {"matchLabels": {"team": "a"}}}
    objects = render(values={"networkPolicy.schedulerFrom": [peer]})
    peers = one(objects, "NetworkPolicy", "-scheduler")["spec"]["ingress"][0]["from"]
    assert peers[-1] == peer
    assert selects(peers[0]["podSelector"]["matchLabels"], labels_of(objects, "gateway"))


@pytest.mark.parametrize("kind", ["Ingress", "HTTPRoute"])
def test_metrics_and_console_stay_inside(kind: str) -> None:
    """What comes from outside reaches the API alone."""
    values = {
        "gateway.ingress.enabled": True,
        "gateway.httpRoute.enabled": True,
        "gateway.httpRoute.parentRefs": [{"name": "public"}],
    }
    spec = one(render(values=values), kind)["spec"]
    if kind == "Ingress":
        paths = {path["path"] for path in spec["rules"][0]["http"]["paths"]}
    else:
        paths = {match["path"]["value"] for match in spec["rules"][0]["matches"]}
    assert paths == {"/v1", "/tokenize", "/detokenize"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_services_lead_to_their_pods(name: str) -> None:
    """By labels and by a port that the pods name."""
    objects = example(name)
    for service in of_kind(objects, "Service"):
        spec = service["spec"]
        part = spec["selector"]["app.kubernetes.io/component"]
        assert selects(spec["selector"], labels_of(objects, part))
        named = {port["name"] for port in pods(list(objects))[part]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in spec["ports"]} <= named
    heads = [s for s in of_kind(objects, "Service") if s["spec"].get("clusterIP") == "None"]
    assert len(heads) == 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_budgets_and_spreads_are_of_the_own_pods(name: str) -> None:
    """Not of another component's."""
    objects = example(name)
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert len(budgets) == 3
    for budget in budgets:
        part = budget["metadata"]["labels"]["app.kubernetes.io/component"]
        assert selects(budget["spec"]["selector"]["matchLabels"], labels_of(objects, part))
    for part in SERVICES:
        for spread in pods(list(objects))[part].get("topologySpreadConstraints", ()):
            assert selects(spread["labelSelector"]["matchLabels"], labels_of(objects, part))


# -- how pods end ----------------------------------------------------------------------


@pytest.mark.parametrize("part", SERVICES)
def test_grace_periods_add_up(part: str) -> None:
    """Before SIGTERM, the drain that the process is told of, and its exit."""
    seconds = {f"{part}.preStopSeconds": 7, f"{part}.drainSeconds": 41, f"{part}.exitSeconds": 13}
    pod = pods(render(values=seconds))[part]
    assert pod["terminationGracePeriodSeconds"] == 7 + 41 + 13
    (container,) = pod["containers"]
    assert container["lifecycle"]["preStop"]["sleep"]["seconds"] == 7
    assert environment(container)[f"OCTAVO_{part.upper()}_GRACE_SECONDS"] == "41"


@pytest.mark.parametrize(
    ("schedulers", "executors", "surge", "unavailable"),
    [(1, 1, 0, 1), (1, 2, 1, 0), (3, 3, 0, 1), (3, 4, 1, 0), (2, 1, 0, "100%")],
)
def test_a_rollout_never_waits_for_an_executor_that_there_is_not(
    schedulers: int, executors: int, surge: int, unavailable: int | str
) -> None:
    """A scheduler is ready once it holds one: one more comes first only if it finds one."""
    values = {
        "scheduler.replicas": schedulers,
        "executor.replicas": executors,
        "scheduler.allowStandby": True,
    }
    deployment = one(render(values=values), "Deployment", "-scheduler")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": surge,
        "maxUnavailable": unavailable,
    }


@pytest.mark.parametrize("part", ["scheduler", "executor"])
def test_who_scales_has_the_say_on_replicas(part: str) -> None:
    """An upgrade does not set back what an autoscaler chose."""
    kind = {"scheduler": "Deployment", "executor": "StatefulSet"}[part]
    assert "replicas" in one(render(), kind, f"-{part}")["spec"]
    objects = list(example("production"))
    assert "replicas" not in one(objects, kind, f"-{part}")["spec"]
    scaler = one(
        objects, {"scheduler": "HorizontalPodAutoscaler", "executor": "ScaledObject"}[part]
    )
    target = scaler["spec"]["scaleTargetRef"]
    aim = one(objects, target["kind"], f"-{part}")
    assert (target["apiVersion"], target["name"]) == (aim["apiVersion"], aim["metadata"]["name"])


# -- devices and models ----------------------------------------------------------------


def test_an_executor_takes_its_gpu() -> None:
    """As request and limit, beside what else it was given."""
    resources = pods(list(example("single-gpu")))["executor"]["containers"][0]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 1
    assert resources["limits"]["memory"] == "32Gi"
    other = render(values={"executor.gpu.resourceName": "amd.com/gpu"})
    assert pods(other)["executor"]["containers"][0]["resources"]["limits"]["amd.com/gpu"] == 1


def test_the_cpu_demo_takes_none() -> None:
    """It computes on as many threads as it has CPUs, in an image for CPUs."""
    (container,) = pods(list(example("cpu-demo")))["executor"]["containers"]
    assert "nvidia.com/gpu" not in str(container)
    assert environment(container)["OCTAVO_EXECUTOR_DEVICE"] == "cpu"
    assert container["image"].endswith("-cpu")
    (threads,) = (e for e in container["env"] if e["name"] == "OCTAVO_EXECUTOR_NUM_THREADS")
    assert threads["valueFrom"]["resourceFieldRef"]["resource"] == "limits.cpu"
    given = render(EXAMPLES["cpu-demo"], values={"executor.config.numThreads": 3})
    names = [e["name"] for e in pods(given)["executor"]["containers"][0]["env"]]
    assert names.count("OCTAVO_EXECUTOR_NUM_THREADS") == 1


@pytest.mark.parametrize(("name", "part"), every_pod())
def test_no_variable_is_set_twice(name: str, part: str) -> None:
    """The last would win, silently."""
    for container in containers(pods(list(example(name)))[part]):
        names = [each["name"] for each in container["env"]]
        assert len(set(names)) == len(names)


def test_schedulers_need_no_weights_of_the_hub() -> None:
    """They read tokenizer and configuration themselves; of the default model they fetch all."""
    hub = pods(list(example("single-gpu")))
    assert "initContainers" not in hub["scheduler"]
    (fetch,) = hub["executor"]["initContainers"]
    assert fetch["args"] == ["Qwen/Qwen2.5-7B-Instruct"]
    (token,) = (e for e in fetch["env"] if e["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hub-token", "key": "token"}
    default = pods(list(example("cpu-demo")))
    for part in ("scheduler", "executor"):
        assert default[part]["initContainers"][0]["args"] == ["smollm2-135m-instruct"]


@pytest.mark.parametrize(
    ("values", "volume"),
    [
        ({"model.source": "pvc", "model.pvc.claimName": "c"}, "persistentVolumeClaim"),
        ({"model.source": "hostPath", "model.hostPath.path": "/m"}, "hostPath"),
        ({"model.source": "image", "model.image.reference": "example.com/m:1"}, "image"),
    ],
)
def test_models_that_are_there_are_only_read(values: dict[str, Any], volume: str) -> None:
    """By both services; nothing is fetched."""
    found = pods(render(values={**values, "model.name": "org/name"}))
    for part in ("scheduler", "executor"):
        assert "initContainers" not in found[part]
        (models,) = (v for v in found[part]["volumes"] if v["name"] == "models")
        assert volume in models
        mounts = found[part]["containers"][0]["volumeMounts"]
        (mount,) = (m for m in mounts if m["name"] == "models")
        assert mount["readOnly"] is True
        # An image is one model's folder; the others have one for each.
        assert mount["mountPath"] == ("/models/org--name" if volume == "image" else "/models")


def test_a_leader_worker_set_has_the_same_pods() -> None:
    """Found by the same service, and scaled by the same rules."""
    plain = list(example("production"))
    values = {"executor.leaderWorkerSet.enabled": True}
    grouped = render(PRODUCTION, values=values)
    assert pods(grouped)["executor"] == pods(plain)["executor"]
    assert not of_kind(grouped, "StatefulSet")
    aim, target = one(grouped, "LeaderWorkerSet"), one(grouped, "ScaledObject")
    assert target["spec"]["scaleTargetRef"] == {
        "apiVersion": aim["apiVersion"],
        "kind": aim["kind"],
        "name": aim["metadata"]["name"],
    }
    # Its controller makes a service of the set's name.
    names = {each["metadata"]["name"] for each in of_kind(grouped, "Service")}
    assert aim["metadata"]["name"] not in names


@pytest.mark.parametrize("file", CI_VALUES, ids=lambda file: file.stem)
def test_the_images_are_those_that_were_asked_for(file: Path) -> None:
    """One registry and tag for all; a digest wins."""
    digest = "sha256:" + "a" * 64
    values = {
        "image.registry": "r.example/o",
        "image.tag": "9.9",
        "gateway.image.digest": digest,
    }
    found = pods(render(file, values=values))
    suffix = "-cpu" if "cpu" in file.stem else ""
    assert found["scheduler"]["containers"][0]["image"] == "r.example/o/octavo-scheduler:9.9"
    assert found["executor"]["containers"][0]["image"] == f"r.example/o/octavo-executor:9.9{suffix}"
    assert found["gateway"]["containers"][0]["image"] == f"r.example/o/octavo-gateway@{digest}"
