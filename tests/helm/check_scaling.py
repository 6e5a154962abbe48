"""What executors are scaled by: KEDA's queries, asked of a real Prometheus over a real stack.

Needs prometheus on the PATH; Debian's package "prometheus" has it. Run by `make chart-check`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from bisect import bisect_left
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from octavo_client import AsyncClient, EventKind, Snapshot
from octavo_client._local import LocalOptions, LocalStack
from octavo_client._socket import settle_address

from scheduler_svc.observation import definitions
from tests.support.chart import CI_VALUES, NAMESPACE, Manifest, one, pods, render

PRODUCTION = next(file for file in CI_VALUES if file.stem.startswith("production"))
PARTS = ("scheduler", "executor")
# A pool that a few requests fill, so that the others wait.
NUM_BLOCKS, NUM_ROWS, NUM_CLIENTS, NUM_TOKENS = 40, 8, 64, 64
LOAD_SECONDS = 45.0
WINDOW_SECONDS = 120.0  # of rate() in the query
SETTLE_SECONDS = 60.0
WATCH_SECONDS = 0.05
# A sample is stamped before it is taken: the state that it shows is of these seconds around.
BEFORE_SECONDS, AFTER_SECONDS = 0.2, 1.0
CLOCKS_SECONDS = 0.1  # the metric and the story of a request do not begin at one moment
TOLERANCE = 0.1  # within which Kubernetes leaves a size as it is


class Prometheus:
    """A running Prometheus, asked as KEDA asks it."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._url = url
        self._http = http

    async def ask(self, trigger: Manifest, at: float | None = None) -> float:
        """A trigger's number, now or at a time in seconds since 1970.

        Raises:  AssertionError: if there is not exactly one, of which KEDA makes an error.
        """
        metadata = trigger["metadata"]
        params = {"query": metadata["query"]} | ({} if at is None else {"time": f"{at:.3f}"})
        answer = await self._http.get(f"{metadata['serverAddress']}/api/v1/query", params=params)
        body = answer.json()
        assert body["status"] == "success", body
        (sample,) = body["data"]["result"]
        return float(sample["value"][1])

    async def times(self, series: str, seconds: float) -> list[float]:
        """When the samples of a series were taken, in seconds since 1970."""
        url = f"{self._url}/api/v1/query"
        answer = await self._http.get(url, params={"query": f"{series}[{seconds:.0f}s]"})
        (found,) = answer.json()["data"]["result"]
        return [float(at) for at, _ in found["values"]]

    async def until_scraped(self, num_targets: int) -> None:
        """Wait until it has every target's metrics."""
        async with asyncio.timeout(SETTLE_SECONDS):
            while True:
                try:
                    answer = await self._http.get(f"{self._url}/api/v1/targets?state=active")
                    targets = answer.json()["data"]["activeTargets"]
                except (httpx.TransportError, ValueError):
                    targets = []  # it still starts
                if [target["health"] for target in targets] == ["up"] * num_targets:
                    return
                await asyncio.sleep(0.2)


def scrape_jobs(objects: list[Manifest], ports: dict[str, str]) -> list[Manifest]:
    """What the Prometheus Operator makes of the PodMonitors, for one pod of each.

    It labels targets by namespace, container, pod and endpoint, and then relabels as asked.
    """
    jobs = []
    for part, address in ports.items():
        monitor = one(objects, "PodMonitor", f"-{part}")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        labels = {
            "namespace": NAMESPACE,
            "container": pods(objects)[part]["containers"][0]["name"],
            "pod": f"octavo-{part}-0",
            "endpoint": endpoint["port"],
        }
        relabel = [
            {"target_label": each["targetLabel"], "replacement": each["replacement"]}
            for each in endpoint["relabelings"]
        ]
        jobs.append(
            {
                "job_name": f"podMonitor/{NAMESPACE}/{monitor['metadata']['name']}/0",
                "metrics_path": endpoint["path"],
                "static_configs": [{"targets": [address], "labels": labels}],
                "relabel_configs": relabel,
            }
        )
    return jobs


@asynccontextmanager
async def prometheus(listen: str, jobs: list[Manifest], folder: Path) -> AsyncIterator[Prometheus]:
    """Run Prometheus, which looks every second."""
    config = folder / "prometheus.yml"
    every = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    # JSON is YAML.
    config.write_text(json.dumps({"global": every, "scrape_configs": jobs}), encoding="utf-8")
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={listen}",
            stdout=log,
            stderr=log,
        )
    try:
        async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
            yield Prometheus(f"http://{listen}", http)
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 15.0)


@pytest.mark.timeout(600)
async def test_executors_are_scaled_by_what_is_there(tmp_path: Path) -> None:
    """Both queries give the numbers that the scheduler itself tells, out of load and back at 0."""
    listen = settle_address("127.0.0.1:0", "--web.listen-address")
    values = {"executor.autoscaling.prometheusAddress": f"http://{listen}"}
    objects = render(PRODUCTION, values=values)
    scaled = one(objects, "ScaledObject")["spec"]
    wait, use = (one_trigger(scaled, name) for name in ("queue-wait", "block-use"))
    ports = {part: settle_address("127.0.0.1:0", "--metrics-listen") for part in PARTS}
    async with (
        LocalStack(options(ports)) as stack,
        prometheus(listen, scrape_jobs(objects, ports), tmp_path) as asked,
        AsyncClient(stack.target) as client,
    ):
        await asked.until_scraped(len(ports))
        assert [await asked.ask(trigger) for trigger in (wait, use)] == [0.0, 0.0]
        begin = time.time()
        waits, snapshots, seen = await load(client, asked, (wait, use))
        await asyncio.sleep(2.0)  # until the last of it is scraped
        assert time.time() - begin < WINDOW_SECONDS, "the load outlasted the query's window"
        await check_queue_wait(asked, wait, waits)
        await check_block_use(asked, use, snapshots, begin)
        grown = [number for number in seen["queue-wait"] if number]
        assert grown[0] < grown[-1]
        few, many = scaled["minReplicaCount"], scaled["maxReplicaCount"]
        for trigger in (wait, use):
            most = max(seen[trigger["name"]])
            assert desired(scaled, few, {trigger["name"]: most}) > few, (trigger["name"], most)
        await until_rest(asked, (wait, use))
        rest = {trigger["name"]: await asked.ask(trigger) for trigger in (wait, use)}
        assert rest == {"queue-wait": 0.0, "block-use": 0.0}
        assert desired(scaled, many, rest) == few


def options(ports: dict[str, str]) -> LocalOptions:
    """A scheduler and an executor with a small pool, where metrics are served."""
    return LocalOptions(
        listen="127.0.0.1:0",
        num_blocks=NUM_BLOCKS,
        num_host_blocks=0,
        block_size=16,
        scheduler_args=(
            *("--metrics-listen", ports["scheduler"]),
            *("--max-num-seqs", str(NUM_ROWS)),
        ),
        executor_args=("--metrics-listen", ports["executor"]),
    )


def one_trigger(scaled: Manifest, name: str) -> Manifest:
    (found,) = [each for each in scaled["triggers"] if each["name"] == name]
    return found


def desired(scaled: Manifest, replicas: int, numbers: dict[str, float]) -> int:
    """What a HorizontalPodAutoscaler wants, for metrics of the type Value.

    Source:  Kubernetes' "Algorithm details": ceil(replicas * number / threshold), the most that
        any metric wants, between the bounds.
    """
    wanted = []
    for name, number in numbers.items():
        trigger = one_trigger(scaled, name)
        assert trigger["metricType"] == "Value"
        ratio = number / float(trigger["metadata"]["threshold"])
        wanted.append(replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(replicas * ratio))
    return min(max(*wanted, scaled["minReplicaCount"]), scaled["maxReplicaCount"])


async def load(
    client: AsyncClient, asked: Prometheus, triggers: tuple[Manifest, ...]
) -> tuple[list[float], list[Snapshot], dict[str, list[float]]]:
    """Ask for more than there is room for, for a while; then leave.

    Returns: how long each that was admitted had waited, as the scheduler explains it; snapshots
        meanwhile; and what the triggers said meanwhile, each second.
    """
    ids: list[str] = []
    snapshots: list[Snapshot] = []
    seen: dict[str, list[float]] = {trigger["name"]: [] for trigger in triggers}

    async def generate(number: int) -> None:
        prompt = f"Player {number}: {'the rules of the game are as follows, ' * 5}"
        while True:
            ids.append(f"load-{len(ids)}")
            await client.generate(
                prompt, request_id=ids[-1], max_tokens=NUM_TOKENS, ignore_eos=True
            )

    async def watch() -> None:
        async for snapshot in client.watch(interval=WATCH_SECONDS):
            snapshots.append(snapshot)  # noqa: PERF401  # what is there at the end is wanted

    async def look() -> None:
        while True:
            for trigger in triggers:
                seen[trigger["name"]].append(await asked.ask(trigger))
            await asyncio.sleep(1.0)

    jobs = [*(generate(number) for number in range(NUM_CLIENTS)), watch(), look()]
    tasks = [asyncio.create_task(job) for job in jobs]
    _, pending = await asyncio.wait(
        tasks, timeout=LOAD_SECONDS, return_when=asyncio.FIRST_EXCEPTION
    )
    for task in pending:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [end for end in ends if not isinstance(end, asyncio.CancelledError)] == []
    waits = [await wait_of(client, request_id) for request_id in ids]
    return [wait for wait in waits if wait is not None], snapshots, seen


async def wait_of(client: AsyncClient, request_id: str) -> float | None:
    """Seconds from a request's arrival to its first admission; None if it was not admitted."""
    story = await client.explain(request_id)
    at = {event.kind: event.time_unix_ns for event in reversed(story.events)}
    if EventKind.ADMITTED not in at:
        return None
    return (at[EventKind.ADMITTED] - at[EventKind.QUEUED]) / 1e9


async def check_queue_wait(asked: Prometheus, wait: Manifest, waits: list[float]) -> None:
    """The quantile lies in the bucket of the request that is the ninth of ten by its wait."""
    ninth = sorted(waits)[math.ceil(0.9 * len(waits)) - 1]
    bounds = (0.0, *definitions.QUEUE_WAIT.buckets)
    below = bounds[bisect_left(bounds, ninth - CLOCKS_SECONDS) - 1]
    above = bounds[bisect_left(bounds, ninth + CLOCKS_SECONDS)]
    number = await asked.ask(wait)
    assert 0 < below <= number <= above, (number, ninth)


async def check_block_use(
    asked: Prometheus, use: Manifest, snapshots: list[Snapshot], begin: float
) -> None:
    """At each scrape the query says what snapshots of that moment say."""
    shares = [(snapshot.time_unix_ns / 1e9, share_of(snapshot)) for snapshot in snapshots]
    series = 'octavo_scheduler_pool_blocks{state="referenced"}'
    times = await asked.times(series, time.time() - begin)
    compared = 0
    for at in times:
        near = [share for when, share in shares if -BEFORE_SECONDS <= when - at <= AFTER_SECONDS]
        if not near or not shares[0][0] <= at <= shares[-1][0] - AFTER_SECONDS:
            continue
        number = await asked.ask(use, at)
        slack = 1 / NUM_BLOCKS
        assert min(near) - slack <= number <= max(near) + slack, (at, number, near)
        compared += 1
    assert compared >= 5


def share_of(snapshot: Snapshot) -> float:
    """The share of the blocks that are referenced, over all executors."""
    pools = [executor.pool for executor in snapshot.executors]
    return sum(pool.num_referenced for pool in pools) / sum(pool.num_total for pool in pools)


async def until_rest(asked: Prometheus, triggers: tuple[Manifest, ...]) -> None:
    """Wait until nothing of the load is in the query's window.

    Raises:  TimeoutError: if that is long over.
    """
    async with asyncio.timeout(WINDOW_SECONDS + SETTLE_SECONDS):
        while any([await asked.ask(trigger) for trigger in triggers]):
            await asyncio.sleep(2.0)


@pytest.mark.parametrize("values", [None, PRODUCTION], ids=["defaults", "production"])
def test_what_schedulers_are_scaled_by_is_requested(values: Path | None) -> None:
    """The use of CPU is a share of what is requested, by every container of the pod."""
    given: dict[str, Any] = {"scheduler.autoscaling": {"enabled": True, "maxReplicas": 1}}
    objects = render(*([values] if values else []), values={} if values else given)
    scaler = one(objects, "HorizontalPodAutoscaler")["spec"]
    (metric,) = scaler["metrics"]
    assert metric["resource"]["name"] == "cpu"
    assert metric["resource"]["target"]["type"] == "Utilization"
    target = one(objects, "Deployment", "-scheduler")
    assert target["metadata"]["name"] == scaler["scaleTargetRef"]["name"]
    for container in target["spec"]["template"]["spec"]["containers"]:
        assert container["resources"]["requests"]["cpu"]
