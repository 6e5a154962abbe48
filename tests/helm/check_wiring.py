"""That what the chart tells the processes fits them, and one another: settings, TLS, metrics.

Run by `make chart-check`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from octavo import probe

from tests.support.chart import (
    CI_VALUES,
    ROOT,
    SERVICES,
    Manifest,
    containers,
    environment,
    generator,
    one,
    pods,
    render,
)

PRODUCTION = next(file for file in CI_VALUES if file.stem.startswith("production"))
GIVEN = {
    "tls.executors": {"enabled": True, "serverSecret": "es", "clientSecret": "ec"},
    "tls.scheduler": {"enabled": True, "mutual": True, "serverSecret": "ss", "clientSecret": "sc"},
    "tls.gateway": {"enabled": True, "serverSecret": "gs"},
}
OTHERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "given-secrets": GIVEN,
    "IPv6": {"bindAddress": "[::]"},
    "no-metrics": {"metrics.enabled": False},
    "every-setting": {
        "scheduler.config": {"maxRequestBytes": 67108864, "prefixCache": False, "watermark": 0.05},
        "executor.config": {"cudaGraphs": False, "numHostBlocks": 0, "maxNumRows": 512},
        "gateway.config": {"corsOrigins": ["https://a.example", "https://b.example"]},
    },
}
WAYS: list[Path | str] = [*CI_VALUES, *OTHERS]


def rendered(way: Path | str) -> list[Manifest]:
    return render(way) if isinstance(way, Path) else render(values=OTHERS[way])


def name_of(way: Path | str) -> str:
    return way.stem if isinstance(way, Path) else way


def clear_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OCTAVO_"):
            monkeypatch.delenv(name)


def main_container(objects: list[Manifest], part: str) -> Manifest:
    found: Manifest = pods(objects)[part]["containers"][0]
    return found


# -- settings --------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_each_process_takes_its_settings(way: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by the services' own classes, and nothing of it is unknown to them."""
    objects = rendered(way)
    for part in SERVICES:
        clear_of_ours(monkeypatch)
        prefix = f"OCTAVO_{part.upper()}_"
        given = environment(main_container(objects, part))
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        settings = generator().SERVICES[part]
        read = settings()
        fields = {name.removeprefix(prefix).lower() for name in given if name.startswith(prefix)}
        assert len(fields) >= 4
        assert fields <= set(settings.model_fields)
        assert {"listen", "grace_seconds"} <= fields & read.model_fields_set


def test_settings_arrive_as_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large numbers, switches, fractions and lists."""
    objects = rendered("every-setting")
    for part in SERVICES:
        clear_of_ours(monkeypatch)
        for name, value in environment(main_container(objects, part)).items():
            monkeypatch.setenv(name, value)
        read = generator().SERVICES[part]()
        for key, value in OTHERS["every-setting"][f"{part}.config"].items():
            field = re.sub("[A-Z]", lambda match: "_" + match[0].lower(), key)
            assert getattr(read, field) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_ports_are_those_that_are_listened_on(way: Path | str) -> None:
    """Of the containers, of the probes, and of who connects."""
    objects = rendered(way)
    for part in SERVICES:
        container = main_container(objects, part)
        variables = environment(container)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        prefix = f"OCTAVO_{part.upper()}_"
        listen = variables[f"{prefix}LISTEN"].rpartition(":")
        assert int(listen[2]) == ports["http" if part == "gateway" else "grpc"]
        if metrics := variables.get(f"{prefix}METRICS_LISTEN"):
            assert int(metrics.rpartition(":")[2]) == ports["metrics"]
        else:
            assert "metrics" not in ports
    executors = environment(main_container(objects, "scheduler"))["OCTAVO_SCHEDULER_EXECUTORS"]
    service = one(objects, "Service", "-executor")
    assert service["spec"]["clusterIP"] == "None"
    host = f"{service['metadata']['name']}.llm.svc.cluster.local"
    assert executors == f"dns:///{host}:{service['spec']['ports'][0]['port']}"
    target = environment(main_container(objects, "gateway"))["OCTAVO_GATEWAY_TARGET"]
    heads = one(objects, "Service", "-scheduler-headless")
    host = f"{heads['metadata']['name']}.llm.svc.cluster.local"
    assert target.removeprefix("grpcs://") == f"{host}:{heads['spec']['ports'][0]['port']}"


# -- TLS -------------------------------------------------------------------------------


def files_of(pod: Manifest, container: Manifest) -> set[str]:
    """The files of Octavo's that a container is told of, in its variables and its probes."""
    text = json.dumps([container.get("env"), container.get("command"), container.get("args")])
    text += json.dumps([value for key, value in container.items() if key.endswith("Probe")])
    return set(re.findall(r"/etc/octavo/[\w./-]+", text))


def shown_files(pod: Manifest, container: Manifest) -> dict[str, str]:
    """Every file below its mounts that a secret gives it, with the secret's name."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    shown = {}
    for mount in container["volumeMounts"]:
        secret = volumes.get(mount["name"], {}).get("secret")
        if secret is None:
            continue
        items = secret.get("items") or [{"path": f} for f in ("tls.crt", "tls.key", "ca.crt")]
        for item in items:
            shown[f"{mount['mountPath']}/{item['path']}"] = secret["secretName"]
    return shown


@pytest.mark.parametrize("way", WAYS, ids=name_of)
def test_every_file_that_is_named_is_mounted(way: Path | str) -> None:
    """And every secret that is mounted is of use."""
    for pod in pods(rendered(way)).values():
        for container in containers(pod):
            named, shown = files_of(pod, container), shown_files(pod, container)
            assert named <= shown.keys()
            used = {shown[file] for file in named}
            assert used == set(shown.values())


@pytest.mark.parametrize("values", [{}, GIVEN], ids=["plain", "TLS"])
def test_probes_match_tls(values: dict[str, Any]) -> None:
    """Kubernetes' own where there is none, a command of the image where there is."""
    found = pods(render(values=values))
    for part, kinds in (
        ("scheduler", ["readinessProbe"]),
        ("executor", ["startupProbe", "livenessProbe", "readinessProbe"]),
    ):
        (container,) = found[part]["containers"]
        port = container["ports"][0]["containerPort"]
        for kind in kinds:
            checked = container[kind]
            if values:
                command = checked["exec"]["command"]
                assert command[:5] == ["python", "-P", "-m", "octavo.probe", f"127.0.0.1:{port}"]
            else:
                assert checked["grpc"] == {"port": port}
    (gateway,) = found["gateway"]["containers"]
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert gateway[kind]["httpGet"]["scheme"] == ("HTTPS" if values else "HTTP")


def test_probes_commands_are_understood(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By the program that they name: it gets as far as the files, which are not here."""
    found = pods(render(values=GIVEN))
    for part in ("scheduler", "executor"):
        command = found[part]["containers"][0]["readinessProbe"]["exec"]["command"]
        arguments = [word.replace("/etc/octavo", str(tmp_path)) for word in command[4:]]
        assert probe.main(arguments) == 1
        assert "ca.crt: No such file" in capsys.readouterr().err


def test_a_standby_is_not_killed() -> None:
    """A scheduler without an executor is not ready; its liveness asks something else."""
    (container,) = pods(render())["scheduler"]["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/metrics", "port": "metrics"}
    (container,) = pods(render(values={"metrics.enabled": False}))["scheduler"]["containers"]
    assert container["livenessProbe"]["tcpSocket"] == {"port": "grpc"}


def test_a_model_may_take_its_time() -> None:
    """The first health is waited for as long as the values say; then three misses end it."""
    values = {"executor.startupSeconds": 905, "scheduler.startupSeconds": 61}
    found = pods(render(values=values))
    for part, seconds in (("executor", 905), ("scheduler", 61)):
        startup = found[part]["containers"][0]["startupProbe"]
        waited = startup["periodSeconds"] * startup["failureThreshold"]
        assert seconds <= waited < seconds + startup["periodSeconds"]


def test_executors_trust_one_ca_that_signs_for_nobody_else() -> None:
    """Certificates of the public port open no executor."""
    objects = render(PRODUCTION, values={"tls.gateway.enabled": True})
    certificates = [each for each in objects if each["kind"] == "Certificate"]
    signed: dict[str, set[str]] = {}
    for each in certificates:
        issuer = each["spec"]["issuerRef"]["name"]
        signed.setdefault(issuer, set()).add(each["spec"]["secretName"])
    assert signed["octavo-executors-ca"] == {"octavo-executor-tls", "octavo-executor-client-tls"}
    assert signed["octavo-clients-ca"] == {"octavo-scheduler-client-tls"}
    assert signed["octavo-servers-ca"] == {"octavo-scheduler-tls", "octavo-gateway-tls"}
    trusted = environment(main_container(objects, "executor"))["OCTAVO_EXECUTOR_TLS_CLIENT_CA"]
    pod = pods(objects)["executor"]
    assert shown_files(pod, pod["containers"][0])[trusted] == "octavo-executor-tls"
    trusted = environment(main_container(objects, "scheduler"))["OCTAVO_SCHEDULER_TLS_CLIENT_CA"]
    pod = pods(objects)["scheduler"]
    assert shown_files(pod, pod["containers"][0])[trusted] == "octavo-scheduler-client-tls"


def test_certificates_have_the_names_that_are_connected_to() -> None:
    """And the uses: an executor's is shown by its own probes, too."""
    objects = render(PRODUCTION, values={"tls.gateway.enabled": True})
    by_secret = {
        each["spec"]["secretName"]: each["spec"]
        for each in objects
        if each["kind"] == "Certificate"
    }
    scheduler = environment(main_container(objects, "scheduler"))
    host = scheduler["OCTAVO_SCHEDULER_EXECUTORS"].removeprefix("dns:///").rpartition(":")[0]
    assert host in by_secret["octavo-executor-tls"]["dnsNames"]
    target = environment(main_container(objects, "gateway"))["OCTAVO_GATEWAY_TARGET"]
    host = target.removeprefix("grpcs://").rpartition(":")[0]
    assert host in by_secret["octavo-scheduler-tls"]["dnsNames"]
    url = environment(main_container(objects, "test"))["URL"]
    host = url.removeprefix("https://").rpartition(":")[0]
    assert host in by_secret["octavo-gateway-tls"]["dnsNames"]
    assert {"server auth", "client auth"} <= set(by_secret["octavo-executor-tls"]["usages"])
    assert "server auth" not in by_secret["octavo-executor-client-tls"]["usages"]
    for part in ("scheduler", "executor"):
        command = main_container(objects, part)["readinessProbe"]["exec"]["command"]
        name = command[command.index("--server-name") + 1]
        assert name in by_secret[f"octavo-{part}-tls"]["dnsNames"]


def test_certificates_of_an_issuer_of_yours() -> None:
    """Public ones only; the CA between schedulers and executors stays the chart's own."""
    values = {
        "tls.certManager.issuerRef": {"name": "corporate", "kind": "ClusterIssuer"},
        "tls.certManager.dnsNames": ["llm.example.com"],
    }
    objects = render(PRODUCTION, values=values)
    by_secret = {
        each["spec"]["secretName"]: each["spec"]
        for each in objects
        if each["kind"] == "Certificate"
    }
    server = by_secret["octavo-scheduler-tls"]
    assert server["issuerRef"] == {
        "name": "corporate",
        "kind": "ClusterIssuer",
        "group": "cert-manager.io",
    }
    assert "llm.example.com" in server["dnsNames"]
    assert by_secret["octavo-executor-tls"]["issuerRef"]["name"] == "octavo-executors-ca"
    assert "octavo-servers-ca" not in by_secret


def test_keys_stay_where_they_belong() -> None:
    """Whoever only checks a certificate does not see its key."""
    objects = render(values=GIVEN)
    for part, own in (("gateway", {"gs", "sc"}), ("scheduler", {"ss", "sc", "ec"})):
        pod = pods(objects)[part]
        shown = shown_files(pod, pod["containers"][0])
        assert {secret for file, secret in shown.items() if file.endswith("tls.key")} == own
    pod = pods(objects)["executor"]
    assert set(shown_files(pod, pod["containers"][0]).values()) == {"es"}


# -- metrics ---------------------------------------------------------------------------


def test_monitors_find_what_rules_and_scaling_ask_for() -> None:
    """Ports that the pods have, and jobs of the names that rules and KEDA expect."""
    objects = render(PRODUCTION)
    jobs = {}
    for part in SERVICES:
        monitor = one(objects, "PodMonitor", f"-{part}")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        ports = {port["name"] for port in main_container(objects, part)["ports"]}
        assert endpoint["port"] in ports
        (relabeling,) = endpoint["relabelings"]
        assert relabeling["targetLabel"] == "job"
        jobs[part] = relabeling["replacement"]
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert len(set(jobs.values())) == len(jobs)
    assert all(job.startswith("octavo-") for job in jobs.values())
    for trigger in one(objects, "ScaledObject")["spec"]["triggers"]:
        asked = re.findall(r'job="([^"]+)"', trigger["metadata"]["query"])
        assert set(asked) == {jobs["scheduler"]}
        assert float(trigger["metadata"]["threshold"]) > 0


def test_rules_and_dashboard_are_the_projects() -> None:
    """Word for word: helm's own braces and theirs do not meet."""
    objects = render(PRODUCTION)
    rules = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text(encoding="utf-8")
    assert one(objects, "PrometheusRule")["spec"] == yaml.safe_load(rules)
    board = (ROOT / "deploy" / "grafana" / "octavo.json").read_text(encoding="utf-8")
    config = one(objects, "ConfigMap", "-dashboard")
    assert json.loads(config["data"]["octavo.json"]) == json.loads(board)
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_traces_go_where_they_were_told() -> None:
    """From all three; metrics too if that is asked for; nothing without an endpoint."""
    values = {"telemetry.endpoint": "http://c:4317", "telemetry.headersSecret": "h"}
    for given, exporter in (({}, "none"), ({"telemetry.metrics": True}, "otlp")):
        objects = render(values={**values, **given})
        for part in SERVICES:
            container = main_container(objects, part)
            variables = environment(container)
            assert variables["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://c:4317"
            assert variables["OTEL_METRICS_EXPORTER"] == exporter
            assert variables["OTEL_SERVICE_NAME"] == f"octavo-{part}"
            assert "OTEL_EXPORTER_OTLP_HEADERS" in {each["name"] for each in container["env"]}
            # A variable is filled in only by those before it.
            names = [each["name"] for each in container["env"]]
            assert names.index("POD_NAME") < names.index("OTEL_RESOURCE_ATTRIBUTES")
    assert not any("OTEL" in each["name"] for each in main_container(render(), "scheduler")["env"])


# -- API keys and the test -------------------------------------------------------------


def test_inline_keys_arrive_as_a_file() -> None:
    """In a secret that the scheduler alone mounts."""
    text = '[[keys]]\nname = "a"\n'
    objects = render(values={"apiKeys.inline": text})
    secret = one(objects, "Secret", "-api-keys")
    assert base64.b64decode(secret["data"]["keys.toml"]).decode() == text
    file = environment(main_container(objects, "scheduler"))["OCTAVO_SCHEDULER_API_KEYS"]
    pod = pods(objects)["scheduler"]
    assert shown_files(pod, pod["containers"][0])[file] == secret["metadata"]["name"]
    others = str([pods(objects)[part] for part in ("executor", "gateway")])
    assert secret["metadata"]["name"] not in others


def test_the_test_asks_as_a_user_would() -> None:
    """By the gateway's service; with a key if it has one, else to be refused."""
    objects = render()
    variables = environment(main_container(objects, "test"))
    assert variables["NEEDS_KEY"] == "no"
    service = one(objects, "Service", "-gateway")
    assert variables["URL"] == (
        f"http://{service['metadata']['name']}.llm.svc.cluster.local:"
        f"{service['spec']['ports'][0]['port']}"
    )
    keyed = {"apiKeys.existingSecret": "k"}
    assert environment(main_container(render(values=keyed), "test"))["NEEDS_KEY"] == "yes"
    both = {**keyed, "helmTest.apiKeySecret": "t"}
    assert environment(main_container(render(values=both), "test"))["NEEDS_KEY"] == "no"


def test_without_a_gateway_the_test_asks_a_scheduler() -> None:
    """With the command of its image, over TLS as it is set."""
    values = {**GIVEN, "tls.gateway": {"enabled": False}, "gateway.enabled": False}
    objects = render(values=values)
    container = main_container(objects, "test")
    assert container["command"][:2] == ["octavo", "generate"]
    assert container["command"][-1].startswith("grpcs://octavo-scheduler-headless.")
    assert "--cert-file" in container["args"]
    program = [sys.executable, "-P", "-c", "from octavo_client.cli import main; main()"]
    asked = [*program, container["command"][1], "--help"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    flags = {word for word in [*container["command"], *container["args"]] if word.startswith("--")}
    assert len(flags) > 5
    assert {flag for flag in flags if flag not in told} == set()
    assert not [each for each in objects if "gateway" in each["metadata"]["name"]]
