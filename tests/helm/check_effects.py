"""Every value has an effect on what is rendered: none is left over, none is read in vain.

Run by `make chart-check`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.support.chart import SERVICES, Manifest, Refused, environment, generator, pods, render

_ALL = {
    "scheduler.autoscaling.enabled": True,
    "executor.autoscaling.enabled": True,
    "executor.autoscaling.minReplicas": 4,
    "executor.autoscaling.prometheusAddress": "http://p:9090",
    "gateway.ingress.enabled": True,
    "gateway.httpRoute.enabled": True,
    "gateway.httpRoute.parentRefs": [{"name": "public"}],
    "model.fetch.persistence.enabled": True,
    "model.fetch.hubTokenSecret": "t",
    "model.name": "org/name",
    "tls.executors.enabled": True,
    "tls.scheduler": {"enabled": True, "mutual": True},
    "tls.gateway.enabled": True,
    "tls.certManager.enabled": True,
    "metrics.podMonitor.enabled": True,
    "metrics.rules.enabled": True,
    "metrics.dashboard.enabled": True,
    "telemetry.endpoint": "http://c:4317",
    "helmTest.apiKeySecret": "t",
    "apiKeys.existingSecret": "k",
}
_PVC = {"model.source": "pvc", "model.pvc.claimName": "c", "apiKeys.inline": "x"}
# The first in which a value has an effect is the one that counts.
CONTEXTS: tuple[dict[str, Any], ...] = (
    {},
    _ALL,
    _PVC,
    {"model.source": "hostPath", "model.hostPath.path": "/m"},
    {"model.source": "image", "model.image.reference": "example.com/m:1"},
    {"serviceAccount.create": False, "apiKeys.existingSecret": "k"},
    {
        "tls.executors": {"enabled": True, "serverSecret": "a", "clientSecret": "b"},
        "tls.scheduler": {"enabled": True, "serverSecret": "c", "clientSecret": "d"},
    },
)
# Values whose effect is to be refused, or to lift a refusal: see check_render.py.
REFUSED_ALONE = {"scheduler.allowStandby", "tls.certManager.enabled"}
# What a value without an enum or a bound may be instead.
OTHER: dict[str, Any] = {
    "image.pullSecrets": [{"name": "s"}],
    "clusterDomain": "other.local",
    "device": "cpu",
    "model.source": "pvc",
    "executor.leaderWorkerSet.enabled": True,
    "executor.gpu.resourceName": "amd.com/gpu",
    "executor.autoscaling.minReplicas": 5,
    "executor.autoscaling.prometheusAddress": "http://q:9090",
    "gateway.httpRoute.parentRefs": [{"name": "other"}],
    "gateway.httpRoute.hostnames": ["a.example"],
    "gateway.httpRoute.timeout": "5s",
    "gateway.publicPaths": ["/v2"],
    "telemetry.endpoint": "http://d:4317",
    "tls.certManager.issuerRef": {"name": "corporate"},
    "tls.certManager.dnsNames": ["a.example"],
    "tls.certManager.duration": "48h",
    "tls.certManager.renewBefore": "24h",
    "metrics.podMonitor.interval": "7s",
    "model.hostPath.path": "/other",
    "networkPolicy.schedulerFrom": [{"podSelector": {}}],
    "networkPolicy.gatewayFrom": [{"podSelector": {}}],
    "networkPolicy.executorEgress": [{"ports": [{"port": 5000}]}],
}
# Those that go together with another.
WITH: dict[str, dict[str, Any]] = {
    "model.source": {"model.pvc.claimName": "c"},
    "scheduler.replicas": {"executor.replicas": 4},
    "scheduler.autoscaling.enabled": {"executor.replicas": 4},
    "scheduler.autoscaling.maxReplicas": {"executor.autoscaling.minReplicas": 5},
    "executor.autoscaling.enabled": {
        "executor.autoscaling.prometheusAddress": "http://p:9090",
        "metrics.podMonitor.enabled": True,
    },
    "gateway.httpRoute.enabled": {"gateway.httpRoute.parentRefs": [{"name": "public"}]},
    "tls.executors.enabled": {"tls.certManager.enabled": True},
    "tls.scheduler.enabled": {"tls.certManager.enabled": True},
    "tls.gateway.enabled": {"tls.certManager.enabled": True},
    "executor.leaderWorkerSet.enabled": {"model.fetch.persistence.enabled": False},
    "executor.leaderWorkerSet.size": {"executor.leaderWorkerSet.enabled": True},
    "executor.replicas": {"scheduler.replicas": 1},
}


def leaves() -> list[Any]:
    return list(generator().read_values().leaves())


@cache
def base(index: int, extra: str) -> list[Manifest]:
    return render(values={**CONTEXTS[index], **WITH.get(extra, {})})


def different(value: Any) -> Any:
    """Another value that the schema takes."""
    schema, default = value.schema or {}, value.default
    if value.name in OTHER:
        return OTHER[value.name]
    if value.service:
        return {"logLevel": "debug"}
    if "enum" in schema:
        return next(word for word in schema["enum"] if word != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1 if default < schema["maximum"] else default - 1
    if isinstance(default, float):
        return default / 2
    if isinstance(default, list):
        return [{"name": "EXTRA", "value": "1"}]
    if isinstance(default, dict):
        known = schema.get("properties", {})
        return {next(iter(known)): {"cpu": "7"}} if known else {"example.com/x": "y"}
    if "Gi" in default:
        return "7Gi"
    pattern = schema.get("pattern", "")
    return "sha256:" + "b" * 64 if "sha256" in pattern else "changed"


def effects(value: Any) -> Iterator[bool]:
    """Whether it changes what is rendered, in each context in turn."""
    for index, context in enumerate(CONTEXTS):
        name = value.name
        if any(key != name and key.startswith(f"{name}.") for key in context):
            continue
        values = {**context, **WITH.get(name, {}), name: different(value)}
        # A group that the context gives whole would be given twice.
        group = next((key for key in context if name.startswith(f"{key}.")), None)
        if group is not None:
            values[group] = {**values[group], name.removeprefix(f"{group}."): values.pop(name)}
        try:
            yield render(values=values) != base(index, name)
        except Refused:
            continue  # it does not go together with this context


@pytest.mark.parametrize("name", [v.name for v in leaves() if v.name not in REFUSED_ALONE])
def test_a_value_has_an_effect(name: str) -> None:
    """In some way of using the chart."""
    (value,) = (each for each in leaves() if each.name == name)
    assert any(effects(value))


def test_every_setting_becomes_a_variable() -> None:
    """One for each key of each config."""
    for service in SERVICES:
        values = {}
        for key, schema in generator().settings_of(service).items():
            number = schema.get("minimum", 0.5 if schema.get("type") == "number" else 1)
            words = {"boolean": True, "array": ["x"], "string": "x"}
            values[key] = (
                schema["enum"][0] if "enum" in schema else words.get(schema["type"], number)
            )
        (container,) = pods(render(values={f"{service}.config": values}))[service]["containers"]
        prefix = f"OCTAVO_{service.upper()}_"
        shown = {n.removeprefix(prefix).replace("_", "").lower() for n in environment(container)}
        assert {key.lower() for key in values} <= shown
