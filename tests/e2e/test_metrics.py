"""Metrics of running services: all that is documented, and totals that agree with the work."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio
from octavo.metrics import Kind, Metric
from octavo_client import AsyncClient, Completion, OctavoError
from octavo_client._socket import settle_address
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from prometheus_client.parser import text_string_to_metric_families

from executor_svc import metrics as executor
from scheduler_svc.observation import definitions as scheduler
from tests.e2e.conftest import Serve
from tests.e2e.waiting import until_free
from tests.support.otlp_metrics import MetricsCollector, collecting

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK_SIZE = 8
NUM_BLOCKS = 16
NUM_LEAVING = 40
WAIT = 200.0
Labels = tuple[tuple[str, str], ...]
Values = dict[tuple[str, Labels], float]


@dataclass
class Watched:
    """A stack in a small pool, and where its metrics are."""

    client: AsyncClient
    scheduler: str
    executor: str
    collector: MetricsCollector

    async def scrape(self, address: str) -> Values:
        """Values by series, without the label of the only executor."""
        async with httpx.AsyncClient(trust_env=False, timeout=WAIT) as http:
            answer = await http.get(f"http://{address}/metrics")
        answer.raise_for_status()
        return {
            (sample.name, tuple(sorted(_without_executor(sample.labels)))): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }


def _grown(before: Values, after: Values, metric: Metric, suffix: str = "", **labels: str) -> float:
    key = (metric.name + suffix, tuple(sorted(labels.items())))
    return after[key] - before[key]


def _without_executor(labels: dict[str, str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in labels.items() if name != "executor"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(serve: Serve) -> AsyncIterator[Watched]:
    """Both services, told where to serve their metrics, and where to push them."""
    ports = [settle_address("127.0.0.1:0", "--metrics-listen") for _ in range(2)]
    with collecting() as collector, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", collector.endpoint)
        environment.setenv("OTEL_METRIC_EXPORT_INTERVAL", "250")
        async with serve(
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            num_host_blocks=16,
            scheduler_args=("--metrics-listen", ports[0], "--preemption", "recompute"),
            executor_args=("--kv-check", "--metrics-listen", ports[1]),
        ) as (client, _):
            yield Watched(client, *ports, collector)


def _series(metric: Metric) -> set[str]:
    if metric.kind is Kind.HISTOGRAM:
        return {f"{metric.name}_{suffix}" for suffix in ("bucket", "sum", "count")}
    return {metric.name}


async def test_everything_documented_is_there_and_nothing_else(watched: Watched) -> None:
    """Of both services, before the first request."""
    for address, metrics in (
        (watched.scheduler, scheduler.METRICS),
        (watched.executor, executor.METRICS),
    ):
        found = {name for name, _ in await watched.scrape(address) if name.startswith("octavo_")}
        assert found == set().union(*map(_series, metrics))


async def work(client: AsyncClient) -> list[Completion]:
    """Four requests at once in a pool for two thirds of them, then three samples of one prompt,
    which copy its last block twice, and that prompt twice more, which hits two blocks.
    """
    prompts = [[1000 + 100 * i + k for k in range(20)] for i in range(4)]
    common = {"ignore_eos": True, "timeout": WAIT}
    whole = await asyncio.gather(
        *(
            client.generate(tokens=prompt, max_tokens=24 + i, temperature=0, **common)
            for i, prompt in enumerate(prompts)
        )
    )
    prompt = [9000 + k for k in range(21)]
    several = await client.generate(
        tokens=prompt, n=3, max_tokens=4, seed=1, cache_disable=True, **common
    )
    cold = await client.generate(tokens=prompt, max_tokens=2, **common)
    warm = await client.generate(tokens=prompt, max_tokens=2, **common)
    await until_free(client)
    assert warm.usage.cached_prompt_tokens == 16
    completions = [*whole, several, cold, warm]
    num_tokens = sum(c.usage.num_completion_tokens for c in completions)
    assert num_tokens == sum(24 + i for i in range(4)) + 3 * 4 + 2 * 2
    return completions


async def test_totals_agree_with_the_work(watched: Watched) -> None:
    """Tokens, ends, copies, preemptions and prefix hits are those of a known workload."""
    before = await watched.scrape(watched.scheduler)
    completions = await work(watched.client)
    after = await watched.scrape(watched.scheduler)
    counters = (await watched.client.snapshot()).executors[0].counters

    def grown(metric: Metric, suffix: str = "", **labels: str) -> float:
        return _grown(before, after, metric, suffix, **labels)

    num_tokens = sum(c.usage.num_completion_tokens for c in completions)
    assert grown(scheduler.GENERATED_TOKENS) == num_tokens
    num_choices = sum(len(c.choices) for c in completions)
    assert grown(scheduler.CHOICES, reason="length") == num_choices == 9
    assert grown(scheduler.ENDED_REQUESTS) == len(completions)
    assert grown(scheduler.COPIED_BLOCKS) == 2
    preemptions = sum(c.usage.num_preemptions for c in completions)
    assert preemptions > 0
    assert grown(scheduler.PREEMPTIONS, kind="recompute") == preemptions
    assert grown(scheduler.PREEMPTIONS, kind="swap") == 0
    assert grown(scheduler.PREFIX_HIT_TOKENS) >= 16
    for metric, count in (
        (scheduler.GENERATED_TOKENS, counters.num_generated_tokens),
        (scheduler.PROMPT_TOKENS, counters.num_prompt_tokens),
        (scheduler.PREFIX_HIT_TOKENS, counters.num_prefix_hit_tokens),
        (scheduler.PREFIX_QUERY_TOKENS, counters.num_prefix_query_tokens),
        (scheduler.STEPS, counters.num_steps),
    ):
        assert after[metric.name, ()] == count, metric.name

    assert grown(scheduler.QUEUE_WAIT, "_count") == len(completions)
    assert grown(scheduler.TIME_TO_FIRST_TOKEN, "_count") == len(completions)
    # Every token but the first of each choice has one before it.
    assert grown(scheduler.INTER_TOKEN, "_count") == num_tokens - num_choices
    longest = max(c.usage.total_seconds for c in completions)
    total = grown(scheduler.CHOICE_SECONDS, "_sum", reason="length")
    assert 0 < total <= num_choices * (longest + 1)


async def test_both_services_tell_the_same_of_steps(watched: Watched) -> None:
    """Their number, their tokens and their time since the start; phases add up to steps."""
    await watched.client.generate("One more", max_tokens=8, ignore_eos=True, timeout=WAIT)
    await until_free(watched.client)
    told, by_device = (
        await watched.scrape(watched.scheduler),
        await watched.scrape(watched.executor),
    )

    def of(metric: Metric, suffix: str = "", **labels: str) -> float:
        return told[metric.name + suffix, tuple(sorted(labels.items()))]

    steps = of(scheduler.EXECUTED_STEPS)
    assert steps == of(scheduler.STEPS) == by_device[executor.STEPS.name, ()] >= 8
    assert steps == of(scheduler.STEP_SECONDS, "_count")
    phases = {phase: of(scheduler.EXECUTOR_PHASE, phase=phase) for phase in scheduler.PHASES}
    assert sum(phases.values()) == pytest.approx(of(scheduler.STEP_SECONDS, "_sum"))
    # No plan need ever have waited for the device.
    assert [phase for phase, seconds in phases.items() if not seconds] in ([], ["queue"])
    sampled = by_device[executor.SAMPLED_TOKENS.name, ()]
    assert sampled == of(scheduler.GENERATED_TOKENS) + of(scheduler.DISCARDED_TOKENS)
    assert of(scheduler.STEP_TOKENS, "_sum") >= sampled
    assert by_device[executor.BUSY.name, ()] == pytest.approx(of(scheduler.EXECUTOR_BUSY))
    assert by_device[executor.POOL_BLOCKS.name, (("pool", "device"),)] == NUM_BLOCKS
    assert by_device[executor.OWNED.name, ()] == 1


async def test_a_collector_gets_the_same_values(watched: Watched) -> None:
    """Once all is at rest: every series of the scrape, and no other."""
    for address, service, metrics in (
        (watched.scheduler, "octavo-scheduler", scheduler.METRICS),
        (watched.executor, "octavo-executor", executor.METRICS),
    ):
        scraped = {
            key: value
            for key, value in (await watched.scrape(address)).items()
            if key[0].startswith("octavo_") and not key[0].endswith("_bucket")
        }
        pushed: Values = {}
        async with asyncio.timeout(WAIT):
            while pushed != scraped:
                await asyncio.sleep(0.1)
                latest = watched.collector.latest(service)
                pushed = {key: value for m in metrics for key, value in _points(m, latest)}
        assert len(pushed) > 20


def _points(
    metric: Metric, pushed: dict[str, metrics_pb2.Metric]
) -> Iterator[tuple[tuple[str, Labels], float]]:
    """What was pushed of a metric, as a scrape has it."""
    found = pushed.get(metric.base_name, metrics_pb2.Metric())
    for point in (*found.sum.data_points, *found.gauge.data_points):
        value = point.as_int if point.HasField("as_int") else point.as_double
        yield (metric.name, _labels(point.attributes)), value
    for point in found.histogram.data_points:
        assert tuple(point.explicit_bounds) == metric.buckets
        assert sum(point.bucket_counts) == point.count
        yield (f"{metric.name}_sum", _labels(point.attributes)), point.sum
        yield (f"{metric.name}_count", _labels(point.attributes)), point.count


def _labels(attributes: Iterable[common_pb2.KeyValue]) -> Labels:
    labels = {each.key: each.value.string_value for each in attributes}
    return tuple(sorted(_without_executor(labels)))


async def test_gauges_are_right_after_mass_cancels(watched: Watched) -> None:
    """Forty clients that leave in the middle leave nothing behind."""
    leave = asyncio.Event()

    async def begin_and_leave(number: int) -> None:
        async with watched.client.stream(
            tokens=[3000 + number] * 10, max_tokens=100, ignore_eos=True, timeout=WAIT
        ) as stream:
            first = asyncio.create_task(anext(stream))
            await leave.wait()
            first.cancel()

    before = await watched.scrape(watched.scheduler)
    clients = [asyncio.create_task(begin_and_leave(number)) for number in range(NUM_LEAVING)]
    async with asyncio.timeout(WAIT):
        while True:
            busy = await watched.scrape(watched.scheduler)
            if busy[scheduler.LIVE_REQUESTS.name, ()] == NUM_LEAVING:
                break
    leave.set()
    await asyncio.gather(*clients)
    await until_free(watched.client)
    after = await watched.scrape(watched.scheduler)
    assert busy[scheduler.STREAMS.name, ()] == NUM_LEAVING
    assert busy[scheduler.QUEUED_REQUESTS.name, ()] > 0 < busy[scheduler.POOL_LIVE_SLOTS.name, ()]
    for gauge in (
        scheduler.STREAMS,
        scheduler.LIVE_REQUESTS,
        scheduler.QUEUED_REQUESTS,
        scheduler.RUNNING_SEQUENCES,
        scheduler.PREEMPTED_SEQUENCES,
        scheduler.LOAD_TOKENS,
        scheduler.POOL_SHARED_BLOCKS,
        scheduler.POOL_LIVE_SLOTS,
    ):
        assert after[gauge.name, ()] == 0, gauge.name
    pool = scheduler.POOL_BLOCKS.name
    states = {labels[0][1]: n for (name, labels), n in after.items() if name == pool}
    assert states["referenced"] == 0
    assert states["free"] + states["cached"] == NUM_BLOCKS
    ended = (scheduler.ENDED_REQUESTS.name, ())
    assert after[ended] - before[ended] == NUM_LEAVING
    cancelled = (scheduler.CHOICES.name, (("reason", "cancelled"),))
    assert after[cancelled] - before[cancelled] == NUM_LEAVING


async def test_refusals_are_counted_by_error(watched: Watched) -> None:
    """What the caller was told is what is counted."""
    key = (scheduler.REFUSED.name, (("error", "NeverFits"),))
    before = (await watched.scrape(watched.scheduler))[key]
    with pytest.raises(OctavoError):
        await watched.client.generate(
            tokens=[5] * (NUM_BLOCKS + 1) * BLOCK_SIZE, max_tokens=1, timeout=WAIT
        )
    assert (await watched.scrape(watched.scheduler))[key] == before + 1


async def test_a_taken_port_ends_the_start_in_one_line(watched: Watched) -> None:
    """It names the flag."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "executor_svc",
        *("--listen", "127.0.0.1:0", "--metrics-listen", watched.executor),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await asyncio.wait_for(process.communicate(), WAIT)
    assert process.returncode == 1
    assert said.decode() == (
        f"octavo executor: cannot listen on {watched.executor}: the port is in use; "
        "give --metrics-listen another one\n"
    )
