"""Asks and ends processes as a kubelet does: probes, preStop, SIGTERM, and what comes after."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.helm.cluster import Cluster, Process, interrupt
from tests.support.chart import Manifest

_PAUSE_SECONDS = 0.5
_OK = range(200, 400)


def failure_of(cluster: Cluster, process: Process, probe: Manifest) -> str:
    """Carry out a probe once; gives "" if it succeeds, else why it does not."""
    seconds = probe.get("timeoutSeconds", 1)
    try:
        if asked := probe.get("grpc"):
            return _grpc(process.port(asked["port"]), asked.get("service", ""), seconds)
        if asked := probe.get("httpGet"):
            return _http(process, asked, seconds)
        if asked := probe.get("tcpSocket"):
            with socket.create_connection(("127.0.0.1", process.port(asked["port"])), seconds):
                return ""
        done = cluster.execute(process, probe["exec"]["command"], seconds)
    except (OSError, httpx.HTTPError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return f"exit status {done.returncode}: {done.stdout}" if done.returncode else ""


def _grpc(port: int, service: str, seconds: float) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if name == "SERVING" else str(name)


def _http(process: Process, asked: Manifest, seconds: float) -> str:
    """A kubelet checks no certificate."""
    url = f"{asked.get('scheme', 'HTTP').lower()}://127.0.0.1:{process.port(asked['port'])}"
    with httpx.Client(verify=False, trust_env=False, timeout=seconds) as client:
        answer = client.get(url + asked["path"])
    return "" if answer.status_code in _OK else f"{answer.status_code}: {answer.text}"


def is_well(cluster: Cluster, process: Process, kind: str) -> bool:
    """Whether a probe such as "readiness" succeeds now."""
    return not failure_of(cluster, process, process.container[f"{kind}Probe"])


def until_started(cluster: Cluster, process: Process) -> None:
    """Wait for the startup probe, as long as a kubelet would before it starts anew.

    Raises:  AssertionError: if it does not succeed in time, or the process ends.
    """
    probe = process.container["startupProbe"]
    seconds = probe["failureThreshold"] * probe["periodSeconds"]
    _until(cluster, process, "startup", probe.get("initialDelaySeconds", 0) + seconds)


def until_ready(cluster: Cluster, process: Process, seconds: float = 60.0) -> None:
    """Wait for the readiness probe: for who has started, and whom it needs has, too.

    Raises:  AssertionError: if it does not succeed in time, or the process ends.
    """
    _until(cluster, process, "readiness", seconds)


def _until(cluster: Cluster, process: Process, kind: str, seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while why := failure_of(cluster, process, process.container[f"{kind}Probe"]):
        assert not process.has_ended, f"{process.tail()}\nended with {process.child.returncode}"
        assert time.monotonic() < give_up, f"{process.tail()}\n{kind} after {seconds:g} s: {why}"
        time.sleep(_PAUSE_SECONDS)


def end(
    cluster: Cluster,
    process: Process,
    at_signal: Callable[[], None] = lambda: None,
    status: int = 0,
) -> None:
    """End a pod: preStop, SIGTERM, and its grace, which begins before preStop.

    Args:
        cluster: that it is in.
        process: of the pod.
        at_signal: called when SIGTERM is due: somebody who has not heard yet still comes.
        status: that it ends with.
    Raises:  AssertionError: if it has to be ended by SIGKILL, or ends with another status.
    """
    begin = time.monotonic()
    grace = process.pod.spec["terminationGracePeriodSeconds"]
    hook = process.container.get("lifecycle", {}).get("preStop", {})
    if "sleep" in hook:
        time.sleep(hook["sleep"]["seconds"])
    else:
        assert not hook, f"{process.pod.name}: no preStop {hook} is known here"
    assert is_well(cluster, process, "readiness"), "it stopped before it was told to"
    at_signal()
    interrupt(process)
    try:
        found = process.child.wait(begin + grace - time.monotonic())
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{process.tail()}\nstill there after {grace} s") from None
    assert found == status, f"{process.tail()}\nended with {found}"
