"""Traces of real processes, as a collector gets them: one request, one trace; steps and links."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio
from octavo_client import AsyncClient
from octavo_client._local import LocalStack

from tests.e2e.conftest import Serve
from tests.support.otlp_receiver import Receiver, Span, receiving

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
NUM_TOKENS = 12


@dataclass(frozen=True)
class Traced:
    client: AsyncClient
    stack: LocalStack
    receiver: Receiver


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def traced(serve: Serve) -> AsyncIterator[Traced]:
    """A stack that sends its spans to a collector of ours, quickly."""
    with receiving() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        patch.setenv("OTEL_METRICS_EXPORTER", "none")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        async with serve(dtype="float32", num_blocks=64, http_listen="127.0.0.1:0") as pair:
            yield Traced(*pair, receiver)


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def requests(spans: list[Span]) -> dict[str, Span]:
    """The scheduler's spans of requests by request id."""
    return {
        str(span.attributes["octavo.request_id"]): span
        for span in spans
        if span.service == "octavo-scheduler" and "octavo.request_id" in span.attributes
    }


async def spans_when(traced: Traced, num_requests: int) -> list[Span]:
    """All spans, once those of so many requests are over and both sides told of their steps."""

    def is_enough(spans: list[Span]) -> bool:
        done = requests(spans).values()
        steps = {span.span_id for span in named(spans, "octavo.scheduler.step")}
        steps &= {span.parent_id for span in named(spans, "octavo.executor.step")}
        return len(done) >= num_requests and all(steps.issuperset(s.links) for s in done)

    return await asyncio.to_thread(traced.receiver.wait, is_enough)


@pytest.mark.asyncio(loop_scope="session")
async def test_one_request_is_one_trace_through_every_process(traced: Traced) -> None:
    traced.receiver.spans.clear()
    async with httpx.AsyncClient(base_url=traced.stack.http_url, timeout=60) as http:
        answer = await http.post(
            "/v1/completions",
            json={"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "temperature": 0},
            headers={"traceparent": f"00-{TRACE}-{CALLER}-01"},
        )
    assert answer.status_code == 200
    await spans_when(traced, 1)
    everyone = {"octavo-gateway", "octavo-scheduler", "octavo-executor"}

    def is_whole(spans: list[Span]) -> bool:
        services = {span.service for span in spans if span.trace_id == TRACE}
        return services == everyone and any(span.parent_id == CALLER for span in spans)

    spans = await asyncio.to_thread(traced.receiver.wait, is_whole)
    mine = [span for span in spans if span.trace_id == TRACE]
    assert {span.service for span in mine} == everyone
    known = {span.span_id for span in mine} | {CALLER}
    assert all(span.parent_id in known for span in mine), "every span hangs on another one"
    (request,) = requests(mine).values()
    assert request.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert request.events == (
        "octavo.queued",
        "octavo.admitted",
        "octavo.first_token",
        "octavo.finished",
    )
    (prefill,) = named(mine, "octavo.executor.prefill")
    assert prefill.parent_id == request.span_id
    assert "Once" not in repr(spans), "no prompt is in a span"


@pytest.mark.asyncio(loop_scope="session")
async def test_steps_link_with_exactly_their_requests_both_ways(traced: Traced) -> None:
    traced.receiver.spans.clear()
    ids = [f"linked-{number}" for number in range(4)]
    counts = [4, 9, 14, 19]
    await asyncio.gather(
        *(
            traced.client.generate(
                f"Story {name}", request_id=name, max_tokens=count, ignore_eos=True
            )
            for name, count in zip(ids, counts, strict=True)
        )
    )
    spans = await spans_when(traced, len(ids))
    by_id = requests(spans)
    assert set(by_id) == set(ids)
    steps = named(spans, "octavo.scheduler.step")
    for step in steps:
        back = {name for name, span in by_id.items() if step.span_id in span.links}
        linked = {name for name, span in by_id.items() if span.span_id in step.links}
        assert back == linked and len(linked) == step.attributes["octavo.step.num_requests"]
    for name, count in zip(ids, counts, strict=True):
        # A step for every token at least, and one or two more that were under way at its end.
        assert count <= len(by_id[name].links) <= count + 3
    sampled = sum(int(str(step.attributes["octavo.step.num_sampled"])) for step in steps)
    assert sum(counts) <= sampled <= sum(counts) + 2 * len(counts)


@pytest.mark.asyncio(loop_scope="session")
async def test_the_phases_of_a_step_add_up(traced: Traced) -> None:
    traced.receiver.spans.clear()
    await traced.client.generate("A long way", request_id="phases", max_tokens=16, ignore_eos=True)
    spans = await spans_when(traced, 1)
    executed = {span.parent_id: span for span in named(spans, "octavo.executor.step")}
    steps = named(spans, "octavo.scheduler.step")
    assert len(steps) >= 16
    for step in steps:
        phases = ("plan", "wire", "queue", "prepare", "forward", "sample")
        took = {name: int(str(step.attributes[f"octavo.step.{name}_ns"])) for name in phases}
        assert sum(took.values()) == pytest.approx(step.took_ns, rel=0.05)
        there = executed[step.span_id]
        children = [span for span in spans if span.parent_id == there.span_id]
        assert sum(span.took_ns for span in children) == pytest.approx(there.took_ns, rel=0.05)
        assert all(
            there.begin_ns <= span.begin_ns and span.end_ns <= there.end_ns for span in children
        )
        # By two processes' clocks of one machine, read at different moments.
        assert step.begin_ns - 10**6 <= there.begin_ns and there.took_ns <= step.took_ns


@pytest.mark.asyncio(loop_scope="session")
async def test_what_a_caller_does_not_want_recorded_is_not(traced: Traced) -> None:
    traced.receiver.spans.clear()
    async with httpx.AsyncClient(base_url=traced.stack.http_url, timeout=60) as http:
        await http.post(
            "/v1/completions",
            json={"prompt": "Quiet", "max_tokens": 3},
            headers={"traceparent": f"00-{TRACE}-{CALLER}-00"},
        )
    await traced.client.generate("Heard", request_id="heard", max_tokens=2)
    spans = await spans_when(traced, 1)
    assert set(requests(spans)) == {"heard"}
    assert all(span.trace_id != TRACE for span in spans)
