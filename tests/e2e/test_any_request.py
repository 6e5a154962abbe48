"""Whatever is sent, the answer is a valid stream or a proper status, and the pool is whole."""

from __future__ import annotations

import asyncio
import os

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from octavo.v1 import inference_pb2, inference_pb2_grpc

from tests.e2e.conftest import Served
from tests.e2e.waiting import until_free
from tests.support.request_strategies import requests
from tests.support.stream_grammar import check_refusal, check_stream

pytestmark = pytest.mark.asyncio(loop_scope="session")

NUM_REQUESTS = 2000 if os.environ.get("OCTAVO_FULL") else 40
# A request may ask for the whole context; what comes after so much of it is more of it, and a
# search for the best of it says nothing until its end.
MOST_EVENTS = 40
MOST_SECONDS = 2.0


async def exchange(target: str, request: inference_pb2.GenerateRequest) -> None:
    """Send a request and judge all that comes back."""
    async with grpc.aio.insecure_channel(target) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60)
        events: list[inference_pb2.GenerateResponse] = []
        try:
            async with asyncio.timeout(None) as patience:
                async for event in call:
                    events.append(event)
                    if len(events) >= MOST_EVENTS:
                        call.cancel()
                        return
                    patience.reschedule(asyncio.get_running_loop().time() + MOST_SECONDS)
        except TimeoutError:
            call.cancel()
            return
        except grpc.aio.AioRpcError as error:
            assert not events, "accepted, and refused afterwards"
            check_refusal(error.code(), list(error.trailing_metadata() or ()))
            return
    check_stream(events, request.n or 1)


@pytest.mark.timeout(60 + 2 * NUM_REQUESTS)
@settings(
    max_examples=NUM_REQUESTS,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(request=requests())
async def test_any_request_is_answered(
    served: Served, request: inference_pb2.GenerateRequest
) -> None:
    """Each alone, so that a failure shrinks to one request."""
    _, stack = served
    await exchange(stack.target, request)


async def test_the_pool_is_whole_afterwards(served: Served) -> None:
    """No block is held, on the device or the host, and both processes answer."""
    client, stack = served
    await until_free(client)
    executor = (await client.snapshot()).executors[0]
    assert executor.pool.num_host_free == executor.pool.num_host_total
    assert executor.counters.num_resyncs == 0, "an executor was lost on the way"
    assert stack.pid("scheduler") and stack.pid("executor")
    assert (await client.generate("Good-bye", max_tokens=3, timeout=30)).choices
