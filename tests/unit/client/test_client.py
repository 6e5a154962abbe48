from __future__ import annotations

import inspect
import threading
import time
from typing import Any

import grpc
import pytest
from octavo_client import (
    AsyncClient,
    Cancelled,
    Client,
    ConnectionFailed,
    DeadlineExceeded,
    Delta,
    Finished,
    Health,
    InvalidArgument,
    RetryPolicy,
    Started,
    Usage,
)

QUICK = RetryPolicy(initial_backoff_seconds=0.01, max_backoff_seconds=0.02)


def test_both_clients_have_one_surface() -> None:
    """Client and AsyncClient offer the same methods with the same parameters."""
    for name, method in inspect.getmembers(AsyncClient, inspect.isfunction):
        if name.startswith("_") and name != "__init__":
            continue
        theirs = inspect.signature(getattr(Client, name))
        assert theirs.parameters == inspect.signature(method).parameters, name


def test_stream_yields_typed_events_in_order(fake: Any) -> None:
    """A blocking stream is one Started, the deltas, one Finished, one Usage."""
    with Client(fake.target) as client, client.stream(tokens=[5, 6], max_tokens=2) as stream:
        kinds = [type(event) for event in stream]
    assert kinds == [Started, Delta, Delta, Finished, Usage]
    assert list(fake.requests[0].tokens.ids) == [5, 6]


def test_cancel_from_another_thread_ends_the_iteration(fake: Any) -> None:
    """Any thread may cancel; the service's work stops and the reader's loop ends."""
    fake.delta_seconds = 0.02
    with Client(fake.target) as client:
        stream = client.stream("hi", max_tokens=1000)
        timer = threading.Timer(0.2, stream.cancel)
        timer.start()
        num_events = sum(1 for _ in stream)
        assert 1 < num_events < 1000
        assert fake.cancelled.wait(5)
        with pytest.raises(Cancelled):
            stream.completion()


def test_broken_stream_resumes_without_gap_or_repeat(fake: Any, wire: Any) -> None:
    """The blocking client resumes as the other one does."""
    fake.failures = [
        wire.Failure(grpc.StatusCode.UNAVAILABLE, after_deltas=2),
        wire.Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, started=False),
    ]
    with Client(fake.target, retry=QUICK) as client:
        completion = client.generate("hi", max_tokens=5)
    assert completion.token_ids == (1, 2, 3, 4, 5)
    assert completion.text == "1 2 3 4 5 "
    assert list(fake.requests[-1].resume[0].token_ids) == [1, 2]
    assert fake.requests[-1].sampling.seed == wire.seed


def test_deadline(fake: Any) -> None:
    """The timeout ends a slow stream."""
    fake.delta_seconds = 0.05
    with Client(fake.target) as client:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.generate("hi", max_tokens=1000, timeout=0.3)
        assert time.monotonic() - begin < 2


def test_errors_of_unary_calls(fake: Any, wire: Any) -> None:
    """Small calls raise the same tree, with details."""
    fake.unary_failures = [
        wire.Failure(
            grpc.StatusCode.INVALID_ARGUMENT,
            "token_ids must be below 49152",
            details=(wire.violation("token_ids", "below 49152"),),
        )
    ]
    with Client(fake.target) as client:
        with pytest.raises(InvalidArgument) as caught:
            client.detokenize([99999])
        assert caught.value.field == "token_ids"
        assert client.tokenize("ab") == (97, 98)
        assert client.health() is Health.SERVING


def test_nothing_listening_is_connection_failed() -> None:
    """A refused connection is reported within the policy's few attempts."""
    with Client("127.0.0.1:1", retry=QUICK) as client, pytest.raises(ConnectionFailed):
        client.generate("hi")


def test_watch_yields_snapshots(fake: Any) -> None:
    """Watch yields values until the caller has enough."""
    fake.snapshot.scheduler_id = "s-1"
    with Client(fake.target) as client:
        watcher = client.watch(interval=0.02)
        assert [next(watcher).scheduler_id for _ in range(3)] == ["s-1"] * 3
