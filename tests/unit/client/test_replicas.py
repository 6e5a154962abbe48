"""Tests of targets with replicas: one of them dead, refusing or stopped, and the other well."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from octavo_client import (
    NO_RETRIES,
    AsyncClient,
    Client,
    ConnectionFailed,
    Delta,
    InvalidArgument,
    RetryPolicy,
    Unavailable,
)

WAIT = 60
NEVER = 1000.0  # a wait that would outlast the test


@pytest.fixture
def dead() -> Iterator[str]:
    """An address at which nothing listens, and nothing will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def mute() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def refuses(fake: Any, wire: Any) -> None:
    failure = wire.Failure(
        grpc.StatusCode.UNAVAILABLE,
        "no executor is connected",
        started=False,
        details=(wire.info("UNAVAILABLE"),),
    )
    fake.failures, fake.unary_failures = [failure] * 10_000, [failure] * 10_000


async def meet(client: AsyncClient, *replicas: Any) -> None:
    """Call until each has been called: until then a call may find the same one every time."""
    async with asyncio.timeout(WAIT):
        while not all(replica.num_unary_calls for replica in replicas):
            await client.tokenize("a")


async def test_a_new_client_does_not_wait_with_an_old_one(serve_at: Any) -> None:
    """Left to gRPC, clients of one process share connections, and the wait for the next too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with AsyncClient(f"127.0.0.1:{port}", retry=NO_RETRIES) as early:
        with pytest.raises(ConnectionFailed):
            await early.tokenize("a")
        with serve_at(port) as fake:
            async with AsyncClient(fake.target, retry=NO_RETRIES) as late:
                assert list(await late.tokenize("a")) == [ord("a")]


async def test_calls_go_to_all_of_a_list(fake: Any, other: Any) -> None:
    """In turn, by one client."""
    async with AsyncClient(f"grpc://{fake.target},{other.target}") as client:
        async with asyncio.timeout(WAIT):
            while not (fake.requests and other.requests):  # the second may connect later
                await client.generate("hi", max_tokens=1)


@pytest.mark.parametrize("dead_first", [True, False])
async def test_a_dead_replica_takes_no_attempt(fake: Any, dead: str, dead_first: bool) -> None:
    """The very first call reaches the other, without any retry."""
    listed = [dead, fake.target] if dead_first else [fake.target, dead]
    for _ in range(5):
        async with AsyncClient(",".join(listed), retry=NO_RETRIES) as client:
            assert (await client.generate("hi", max_tokens=2)).token_ids == (1, 2)
            assert (await client.tokenize("a")) == (97,)
    with Client(",".join(listed), retry=NO_RETRIES) as client:
        assert client.generate("hi", max_tokens=2).token_ids == (1, 2)


async def test_a_mute_replica_takes_no_attempt(fake: Any, mute: str) -> None:
    """A stopped process still accepts connections, and is never thought to be there."""
    async with AsyncClient(f"{mute},{fake.target}", retry=NO_RETRIES) as client:
        for _ in range(5):
            assert (await client.generate("hi", max_tokens=2)).token_ids == (1, 2)


async def test_a_replica_that_refuses_is_followed_by_the_next(
    fake: Any, other: Any, wire: Any
) -> None:
    """At once, by calls one after the other; to wait would take longer than there is."""
    policy = RetryPolicy(initial_backoff_seconds=NEVER, max_backoff_seconds=NEVER)
    target = f"{fake.target},{other.target}"
    async with AsyncClient(target, retry=policy) as client:
        await meet(client, fake, other)
        refuses(fake, wire)
        for _ in range(10):
            assert (await client.generate("hi", max_tokens=2)).token_ids == (1, 2)
            assert (await client.tokenize("a")) == (97,)


def test_so_it_is_without_asyncio(fake: Any, other: Any, wire: Any) -> None:
    """A replica that refuses is followed by the next at once."""
    policy = RetryPolicy(initial_backoff_seconds=NEVER, max_backoff_seconds=NEVER)
    with Client(f"{fake.target},{other.target}", retry=policy) as client:
        for _ in range(10_000):
            client.tokenize("a")
            if fake.num_unary_calls and other.num_unary_calls:
                break
        refuses(fake, wire)
        for _ in range(10):
            assert client.generate("hi", max_tokens=2).token_ids == (1, 2)
            assert client.tokenize("a") == (97,)


async def test_a_crowd_gets_past_a_replica_that_refuses(fake: Any, other: Any, wire: Any) -> None:
    """Calls that take turns with each other may meet it several times; all get through."""
    refuses(fake, wire)
    async with AsyncClient(f"{fake.target},{other.target}") as client:
        answers = await asyncio.gather(*(client.generate("hi", max_tokens=2) for _ in range(200)))
    assert {answer.token_ids for answer in answers} == {(1, 2)}


async def test_a_broken_stream_goes_on_past_a_replica_that_refuses(
    fake: Any, other: Any, wire: Any
) -> None:
    """The tokens that it has go along, and the caller hears of one outage."""
    heard: list[Any] = []
    policy = RetryPolicy(initial_backoff_seconds=NEVER, max_backoff_seconds=NEVER)
    target = f"{fake.target},{other.target}"
    async with AsyncClient(target, retry=policy, on_retry=heard.append) as client:
        await meet(client, fake, other)
        refuses(fake, wire)
        other.failures = [wire.Failure(grpc.StatusCode.UNAVAILABLE, after_deltas=2)]
        stream = client.stream("hi", max_tokens=5)
        tokens = [
            token async for event in stream if isinstance(event, Delta) for token in event.token_ids
        ]
    assert tokens == [1, 2, 3, 4, 5]
    assert [choice.token_ids for choice in other.requests[-1].resume] == [[1, 2]]


async def test_if_all_refuse_the_attempts_are_counted(fake: Any, other: Any, wire: Any) -> None:
    """Four calls to an attempt, and the last refusal is what the caller gets."""
    for each in (fake, other):
        refuses(each, wire)
    policy = RetryPolicy(max_attempts=3, initial_backoff_seconds=0.01)
    async with AsyncClient(f"{fake.target},{other.target}", retry=policy) as client:
        with pytest.raises(Unavailable, match="no executor"):
            await client.generate("hi", max_tokens=2)
        assert len(fake.requests) + len(other.requests) == 12
        with pytest.raises(Unavailable, match="no executor"):
            await client.tokenize("a")
        assert fake.num_unary_calls + other.num_unary_calls == 12


async def test_one_address_is_not_asked_again_at_once(fake: Any, wire: Any) -> None:
    """There is nobody else there: a call to an attempt."""
    refuses(fake, wire)
    policy = RetryPolicy(max_attempts=3, initial_backoff_seconds=0.01)
    async with AsyncClient(fake.target, retry=policy) as client:
        with pytest.raises(Unavailable):
            await client.generate("hi", max_tokens=2)
    assert len(fake.requests) == 3


async def test_if_nobody_answers_that_is_said_before_the_deadline(dead: str) -> None:
    """By the defaults, and not by waiting for somebody to come."""
    async with AsyncClient(f"{dead},{dead}", timeout=WAIT) as client:
        with pytest.raises(ConnectionFailed):
            await client.generate("hi", max_tokens=2)


def test_a_list_with_tls_needs_a_name() -> None:
    """The certificates' own: gRPC would look for one of the whole list."""
    with pytest.raises(InvalidArgument) as caught:
        Client("grpcs://10.0.0.1:1,10.0.0.2:1")
    assert caught.value.field == "server_name"
    Client("grpcs://10.0.0.1:1,10.0.0.2:1", server_name="scheduler").close()


_BEGINS_AND_HANGS = """
import sys, threading
from concurrent import futures
import grpc
from octavo.v1 import inference_pb2 as pb, inference_pb2_grpc

class Service(inference_pb2_grpc.InferenceServiceServicer):
    def Generate(self, request, context):
        yield pb.GenerateResponse(started=pb.Started(model="fake", seed=1, num_prompt_tokens=3))
        yield pb.GenerateResponse(delta=pb.Delta(text="hung ", token_ids=[1]))
        threading.Event().wait()

server = grpc.server(futures.ThreadPoolExecutor(8))
inference_pb2_grpc.add_InferenceServiceServicer_to_server(Service(), server)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.read()
"""


@pytest.fixture
def hanging() -> Iterator[tuple[int, str]]:
    """The id and the address of a process whose streams come to nothing."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _BEGINS_AND_HANGS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.pid, f"127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
async def test_a_stream_leaves_a_stopped_process(hanging: tuple[int, str], fake: Any) -> None:
    """Its machine still answers for it, but no keep-alive: in 15 s the stream goes on."""
    pid, address = hanging
    async with AsyncClient(f"{address},{fake.target}") as client:
        async with asyncio.timeout(WAIT):
            stream, texts = client.stream("hi", max_tokens=3), [""]
            while texts[0] != "hung ":  # until the process has a turn
                stream.cancel()
                stream = client.stream("hi", max_tokens=3)
                texts = [await _next_text(stream)]
            os.kill(pid, signal.SIGSTOP)
            texts += [event.text async for event in stream if isinstance(event, Delta)]
    assert texts == ["hung ", "2 ", "3 "]
    assert [choice.token_ids for choice in fake.requests[-1].resume] == [[1]]


async def _next_text(stream: Any) -> str:
    async for event in stream:
        if isinstance(event, Delta):
            return event.text
    raise AssertionError("there was no token")
