"""Executors of several ranks: one pod with several GPUs, and groups of pods.

Run by `make chart-check`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.chart import CI_VALUES, Manifest, environment, one, pods, render

ONE_POD = next(file for file in CI_VALUES if file.stem == "eight-gpu-tp-values")
PRODUCTION = next(file for file in CI_VALUES if file.stem == "production-values")
GROUPS: dict[str, Any] = {
    "executor.leaderWorkerSet": {"enabled": True, "size": 2},
    "executor.gpu.count": 4,
    "executor.drainSeconds": 41,
}
SIZE = "OCTAVO_EXECUTOR_TENSOR_PARALLEL_SIZE"
PARTS = ("executor", "executor-worker")


@pytest.fixture(scope="module")
def groups() -> list[Manifest]:
    return render(PRODUCTION, values=GROUPS)


def container_of(objects: list[Manifest], part: str) -> Manifest:
    (container,) = pods(objects)[part]["containers"]
    return dict(container)


def labels_of(objects: list[Manifest], part: str) -> dict[str, str]:
    """The labels of a kind of pods of the group."""
    group = one(objects, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    for template in (group["leaderTemplate"], group["workerTemplate"]):
        labels: dict[str, str] = template["metadata"]["labels"]
        if labels["app.kubernetes.io/component"] == part:
            return labels
    raise AssertionError(f"no pods of {part}")


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a selector fits, with all that it asks."""
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def selectors(rules: list[Manifest], side: str) -> Iterator[Manifest]:
    """Yield those of pods that a policy's rules let through on any port."""
    for rule in rules:
        if "ports" not in rule:
            yield from (peer["podSelector"] for peer in rule[side])


def test_one_pod_takes_all_its_gpus_and_says_so() -> None:
    """As many ranks as GPUs; its command stays the image's."""
    container = container_of(render(ONE_POD), "executor")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert environment(container)[SIZE] == "8"
    assert "command" not in container
    alone = container_of(render(), "executor")
    assert SIZE not in environment(alone)


def test_a_group_has_a_rank_for_each_of_its_gpus(groups: list[Manifest]) -> None:
    """All its pods start their share, and are told how many there are in all."""
    spec = one(groups, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert spec["size"] == 2
    assert spec["restartPolicy"] == "RecreateGroupOnPodRestart"
    for part in PARTS:
        container = container_of(groups, part)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
        assert environment(container)[SIZE] == "8"
        assert container["command"] == ["torchrun"]
        told = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
        assert told == {
            "--nnodes": "2",
            "--node-rank": "$(LWS_WORKER_INDEX)",
            "--nproc-per-node": "4",
            "--master-addr": "$(LWS_LEADER_ADDRESS)",
            "--master-port": "29500",
            "--shutdown-timeout": "46",
            "-m": "executor_svc",
        }


def test_torchrun_knows_these_flags(groups: list[Manifest]) -> None:
    """The one of the pinned torch."""
    program = [sys.executable, "-P", "-m", "torch.distributed.run", "--help"]
    said = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    flags = [word for word in container_of(groups, "executor")["args"] if word.startswith("--")]
    assert [flag for flag in flags if flag not in said] == []


def test_only_the_first_pod_of_a_group_is_spoken_to(groups: list[Manifest]) -> None:
    """It has ports, probes, a certificate; services and monitors select it alone."""
    first, other = (container_of(groups, part) for part in PARTS)
    for key in ("ports", "startupProbe", "livenessProbe", "readinessProbe"):
        assert key in first
        assert key not in other
    assert "server" not in str(other["volumeMounts"])
    telling = {"OCTAVO_EXECUTOR_LISTEN", "OCTAVO_EXECUTOR_TLS_CERT"}
    assert telling <= environment(first).keys()
    left = environment(first).items() - environment(other).items()
    assert {name for name, _ in left} >= telling
    assert environment(other).items() <= environment(first).items()
    for kind in ("Service", "PodMonitor"):
        spec = one(groups, kind, "-executor")["spec"]
        selector = spec["selector"] if kind == "PodMonitor" else {"matchLabels": spec["selector"]}
        assert [selects(selector, labels_of(groups, part)) for part in PARTS] == [True, False]


def test_ranks_reach_one_another_and_nobody_else_reaches_them(groups: list[Manifest]) -> None:
    """On any port, which they choose themselves, in both directions."""
    stranger = {**labels_of(groups, "executor"), "app.kubernetes.io/component": "gateway"}
    for part in PARTS:
        policy = one(groups, "NetworkPolicy", f"-{part}")["spec"]
        assert selects(policy["podSelector"], labels_of(groups, part))
        for side, rules in (("from", policy["ingress"]), ("to", policy["egress"])):
            (selector,) = selectors(rules, side)
            assert all(selects(selector, labels_of(groups, other)) for other in PARTS)
            assert not selects(selector, stranger)
    (rule,) = one(groups, "NetworkPolicy", "-executor-worker")["spec"]["ingress"]
    assert rule.keys() == {"from"}


def test_a_group_is_evicted_as_a_whole(groups: list[Manifest]) -> None:
    """Its budget counts all its pods."""
    selector = one(groups, "PodDisruptionBudget", "-executor")["spec"]["selector"]
    assert all(selects(selector, labels_of(groups, part)) for part in PARTS)


def test_all_pods_of_a_group_may_do_as_little(groups: list[Manifest]) -> None:
    """The same account, user and grace."""
    first, other = (pods(groups)[part] for part in PARTS)
    for key in ("serviceAccountName", "securityContext", "terminationGracePeriodSeconds"):
        assert first[key] == other[key]
    assert (
        container_of(groups, PARTS[0])["securityContext"]
        == (container_of(groups, PARTS[1])["securityContext"])
    )
