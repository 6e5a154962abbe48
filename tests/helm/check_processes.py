"""What the chart renders runs: commands, variables, probes and ends, as real processes.

`cluster.py` starts the containers of rendered pods with exactly what is rendered, but for the
table RULES there; `kubelet.py` probes and ends them. Run by `make chart-check`.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from octavo import probe
from octavo_client import Client
from prometheus_client.parser import text_string_to_metric_families

from executor_svc.config import ExecutorConfig
from executor_svc.model_store import resolve
from scheduler_svc.security.key_file import add_key
from tests.helm.cluster import RULES, Cluster, Process, interrupt
from tests.helm.kubelet import end, is_well, until_ready, until_started
from tests.helm.streams import MODEL, Stream, openai_client, over_grpc, over_http
from tests.support.chart import CI_VALUES, SERVICES, Manifest, one, render
from tests.support.otlp_receiver import receiving

DEMO, PRODUCTION = (
    next(file for file in CI_VALUES if file.stem == f"{name}-values")
    for name in ("cpu-demo", "production")
)
PROMPT = "The rules of the game are as follows."
NUM_TOKENS = 96
CONNECT_SECONDS = 30.0
RUN_SECONDS = 900  # two executors load a model on few cores

# The production values, on one machine without a GPU.
SMALLER: dict[str, Any] = {
    "device": "cpu",
    "model.name": MODEL,
    "executor.config.hostCacheGib": 0.25,
    "executor.config.kvCacheGib": 0.25,
    "executor.config.numThreads": 1,
}
# HTTPS as well; names that certificates can have here; keys in a secret of the chart's own.
MORE: dict[str, Any] = {
    "tls.executors.serverName": "executors.octavo.test",
    "tls.gateway.enabled": True,
    "tls.certManager.dnsNames": ["localhost"],
    "apiKeys.existingSecret": "",
    "telemetry.samplerRatio": 1,
}
_CONNECTED = "octavo_scheduler_executor_connected"
COLLECTOR = "collector.observability.svc:4317"


@pytest.fixture(scope="module")
def model() -> Path:
    """The default model, fetched into the local store if it is not there yet."""
    settings = ExecutorConfig()
    return resolve(MODEL, settings.model_store)


def run_release_test(cluster: Cluster) -> subprocess.CompletedProcess[str]:
    """Run what `helm test` runs."""
    pod = cluster.pods["test-0"]
    return cluster.run(pod, pod.spec["containers"][0])


def metric(process: Process, name: str) -> dict[str, float]:
    """A metric's values, by executor."""
    url = f"http://127.0.0.1:{process.port('metrics')}/metrics"
    text = httpx.get(url, trust_env=False).raise_for_status().text
    return {
        sample.labels["executor"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def joined_by(streams: list[Stream], start: Callable[[], Stream]) -> Callable[[], None]:
    """Start one more stream, of which a token has come."""

    def join() -> None:
        streams.append(start())
        streams[-1].until_begun()

    return join


# -- without TLS -----------------------------------------------------------------------


@pytest.mark.timeout(RUN_SECONDS)
def test_the_demo_runs_as_it_is_rendered(tmp_path: Path, model: Path) -> None:
    """From nothing to ready, a request, the chart's own test, and an end that cuts nobody off."""
    with Cluster(render(DEMO), tmp_path, model=model) as cluster:
        scheduler, gateway = cluster.start("scheduler-0"), cluster.start("gateway-0")
        check_a_wait_for_an_executor(cluster, scheduler, gateway)
        executor = cluster.start("executor-0")
        for process in (executor, scheduler, gateway):
            until_started(cluster, process)
            until_ready(cluster, process)
        with openai_client(cluster.url("gateway", "http://")) as ai:
            answer = ai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4)
            assert answer.usage is not None and answer.usage.completion_tokens == 4
            done = run_release_test(cluster)
            assert done.returncode == 0, done.stdout
            assert "one token came" in done.stdout
            streams = [over_http(ai, PROMPT, NUM_TOKENS)]
            streams[0].until_begun()
            for process in (executor, scheduler, gateway):
                assert is_well(cluster, process, "liveness")
                assert is_well(cluster, process, "readiness")
            join = joined_by(streams, lambda: over_http(ai, PROMPT, NUM_TOKENS))
            end(cluster, gateway, join)
            assert [stream.num_tokens() for stream in streams] == [NUM_TOKENS] * 2
        with Client(cluster.url("scheduler-headless"), api_key="") as client:
            join = joined_by(streams, lambda: over_grpc(client, PROMPT, NUM_TOKENS))
            end(cluster, scheduler, join)
            assert streams[-1].num_tokens() == NUM_TOKENS
        end(cluster, executor)
        assert cluster.used == RULES.keys() - {"outside"}


def check_a_wait_for_an_executor(cluster: Cluster, scheduler: Process, gateway: Process) -> None:
    """Neither is ready, and neither is started anew for that."""
    for process in (scheduler, gateway):
        until_started(cluster, process)
        assert is_well(cluster, process, "liveness")
        assert not is_well(cluster, process, "readiness")


# -- with TLS, keys, traces, and two executors -----------------------------------------


@pytest.mark.timeout(RUN_SECONDS)
def test_production_runs_as_it_is_rendered(tmp_path: Path, model: Path) -> None:
    """Mutual TLS on both gRPC hops, HTTPS, keys; streams move from an executor that ends."""
    keys = tmp_path / "keys.toml"
    key = add_key(keys, name="test", tenant="testers", admin=False)
    values = {**SMALLER, **MORE, "apiKeys.inline": keys.read_text(encoding="utf-8")}
    with (
        receiving() as collector,
        Cluster(
            render(PRODUCTION, values=values),
            tmp_path / "cluster",
            model=model,
            copies={"executor": 2},
            secrets={"octavo-test-key": {"apiKey": key.encode()}},
            outside={COLLECTOR: collector.endpoint.removeprefix("http://")},
        ) as cluster,
    ):
        names = ("executor-0", "executor-1", "scheduler-0", "gateway-0")
        *executors, scheduler, gateway = (cluster.start(name) for name in names)
        for process in (*executors, scheduler, gateway):
            until_started(cluster, process)
            until_ready(cluster, process)
        done = run_release_test(cluster)
        assert done.returncode == 0, done.stdout
        assert "one token came" in done.stdout
        until_all_are_found(scheduler, len(executors))
        check_strangers_are_refused(cluster, executors[0], scheduler)
        check_metrics_are_where_prometheus_looks(cluster, [executors[0], scheduler, gateway])
        ca = cluster.secret_folder("octavo-gateway-tls") / "ca.crt"
        url = cluster.url("gateway", "https://")
        with openai_client(url, ca=ca) as ai, pytest.raises(openai.AuthenticationError):
            ai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
        with openai_client(url, key, ca) as ai:
            stays = check_streams_move(cluster, ai, executors, scheduler)
            streams: list[Stream] = []
            end(cluster, gateway, joined_by(streams, lambda: over_http(ai, PROMPT, NUM_TOKENS)))
            assert streams[-1].num_tokens() == NUM_TOKENS
        with secured_client(cluster, key) as client:
            join = joined_by(streams, lambda: over_grpc(client, PROMPT, NUM_TOKENS))
            end(cluster, scheduler, join)
            assert streams[-1].num_tokens() == NUM_TOKENS
        end(cluster, stays)
        assert cluster.used == RULES.keys()
        sent = {f"octavo-{service}" for service in SERVICES}
        spans = collector.wait(lambda spans: sent <= {span.service for span in spans})
        assert {span.service for span in spans} == sent


def until_all_are_found(scheduler: Process, num_executors: int) -> None:
    """Wait until the scheduler, which is ready with one executor, holds all."""
    give_up = time.monotonic() + CONNECT_SECONDS
    while sum((found := metric(scheduler, _CONNECTED)).values()) < num_executors:
        assert time.monotonic() < give_up, f"{scheduler.tail()}\nit holds {found}"
        time.sleep(0.5)


def check_streams_move(
    cluster: Cluster, ai: openai.OpenAI, executors: list[Process], scheduler: Process
) -> Process:
    """End the executor that has more streams; all go on at the other, which is returned."""
    streams = [over_http(ai, f"{PROMPT} Player {number}:", NUM_TOKENS) for number in range(4)]
    for stream in streams:
        stream.until_begun()
    running = metric(scheduler, "octavo_scheduler_running_sequences")
    by_load = sorted(executors, key=lambda each: running[f"127.0.0.1:{each.port('grpc')}"])
    *_, stays, leaves = by_load
    end(cluster, leaves)
    assert [stream.num_tokens() for stream in streams] == [NUM_TOKENS] * 4
    adopted = metric(scheduler, "octavo_scheduler_adopted_requests_total")
    assert adopted[f"127.0.0.1:{stays.port('grpc')}"] >= 1
    return stays


def check_strangers_are_refused(cluster: Cluster, executor: Process, scheduler: Process) -> None:
    """Without a certificate, and by an executor with one of the other hop."""
    own = cluster.secret_folder("octavo-executor-client-tls")
    clients = cluster.secret_folder("octavo-scheduler-client-tls")

    def ask(process: Process, name: str, secret: str, shown: Path | None) -> int:
        address = f"127.0.0.1:{process.port('grpc')}"
        ca = cluster.secret_folder(secret) / "ca.crt"
        arguments = [address, "--server-name", name, "--ca-file", str(ca), "--timeout", "5"]
        if shown is not None:
            arguments += ["--cert-file", f"{shown}/tls.crt", "--key-file", f"{shown}/tls.key"]
        return probe.main(arguments)

    name = MORE["tls.executors.serverName"]
    answers = [ask(executor, name, "octavo-executor-tls", shown) for shown in (own, clients, None)]
    assert answers == [0, 1, 1]
    answers = [
        ask(scheduler, "localhost", "octavo-scheduler-tls", each) for each in (clients, None)
    ]
    assert answers == [0, 1]


def check_metrics_are_where_prometheus_looks(cluster: Cluster, processes: list[Process]) -> None:
    """Each PodMonitor selects a component, and its port and path answer."""
    for process in processes:
        monitor = one(cluster.objects, "PodMonitor", f"-{process.pod.part}")
        selected: Manifest = monitor["spec"]["selector"]["matchLabels"]
        assert selected.items() <= process.pod.labels.items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        host = f"{endpoint.get('scheme', 'http')}://127.0.0.1:{process.port(endpoint['port'])}"
        with httpx.Client(verify=False, trust_env=False) as client:
            answer = client.get(host + endpoint["path"])
        assert answer.status_code == httpx.codes.OK
        assert f"octavo_{process.pod.part}_" in answer.text


def secured_client(cluster: Cluster, key: str) -> Client:
    """Connect to the scheduler as a client outside the cluster would."""
    shown = cluster.secret_folder("octavo-scheduler-client-tls")
    return Client(
        cluster.url("scheduler-headless", "grpcs://"),
        api_key=key,
        ca_file=cluster.secret_folder("octavo-scheduler-tls") / "ca.crt",
        cert_file=shown / "tls.crt",
        key_file=shown / "tls.key",
    )


# -- executors of several ranks --------------------------------------------------------

# The default model has three KV heads.
RANKS: dict[str, dict[str, Any]] = {
    "one pod": {"executor.gpu.count": 3},
    "a group of pods": {"executor.leaderWorkerSet": {"enabled": True, "size": 3}},
}


@pytest.mark.timeout(RUN_SECONDS)
@pytest.mark.parametrize("values", RANKS.values(), ids=RANKS)
def test_a_split_model_runs_as_it_is_rendered(
    values: dict[str, Any], tmp_path: Path, model: Path
) -> None:
    """On CPUs: its ranks meet, one of them is ready, serves, and ends all within the grace."""
    objects = render(DEMO, values={**values, "executor.config.numThreads": 1})
    with Cluster(objects, tmp_path, model=model) as cluster:
        scheduler = cluster.start("scheduler-0")
        executor, *workers = (
            cluster.start(name) for name in cluster.pods if name.startswith("executor")
        )
        for process in (executor, scheduler):
            until_started(cluster, process)
            until_ready(cluster, process)
        with Client(cluster.url("scheduler-headless"), api_key="") as client:
            assert client.generate(PROMPT, max_tokens=8).usage.num_completion_tokens == 8
        end(cluster, scheduler)
        for worker in workers:  # a group is deleted at once
            interrupt(worker)
        # torchrun ends with 1 after a signal.
        end(cluster, executor, status=1 if workers else 0)
        grace = executor.pod.spec["terminationGracePeriodSeconds"]
        assert [worker.child.wait(grace) for worker in workers] == [1] * len(workers)
