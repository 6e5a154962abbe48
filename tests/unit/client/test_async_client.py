from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import grpc
import pytest
from octavo_client import (
    AsyncClient,
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    Delta,
    Finished,
    FinishReason,
    Health,
    Internal,
    InvalidArgument,
    Message,
    NeverFits,
    Overloaded,
    RetryPolicy,
    Started,
    Unavailable,
    Usage,
)

QUICK = RetryPolicy(initial_backoff_seconds=0.01, max_backoff_seconds=0.02)


async def test_stream_yields_typed_events_in_order(fake: Any) -> None:
    """A stream is one Started, the deltas, one Finished per choice, one Usage."""
    async with AsyncClient(fake.target) as client, client.stream("hi", max_tokens=2) as stream:
        events = [event async for event in stream]
    assert [type(event) for event in events] == [Started, Delta, Delta, Finished, Usage]
    assert events[1] == Delta(index=0, text="1 ", token_ids=(1,))
    assert events[3] == Finished(index=0, reason=FinishReason.LENGTH, num_tokens=2)


async def test_generate_returns_every_choice(fake: Any) -> None:
    """Generate adds each choice's deltas up, whatever order they come in."""
    async with AsyncClient(fake.target) as client:
        completion = await client.generate("hi", n=2, max_tokens=3, seed=7)
    assert [choice.token_ids for choice in completion.choices] == [(1, 2, 3), (101, 102, 103)]
    assert completion.choices[1].text == "101 102 103 "
    assert completion.seed == 7
    assert completion.usage.num_completion_tokens == 6


async def test_cancel_reaches_the_service_and_ends_the_iteration(fake: Any) -> None:
    """cancel() stops the service's work, the iteration just ends; twice is harmless."""
    fake.delta_seconds = 0.02
    async with AsyncClient(fake.target) as client:
        stream = client.stream("hi", max_tokens=1000)
        tokens = []
        async for event in stream:
            if isinstance(event, Delta):
                tokens += event.token_ids
            if len(tokens) == 2:
                stream.cancel()
                stream.cancel()
        assert tokens == [1, 2]
        assert await asyncio.to_thread(fake.cancelled.wait, 5)
        with pytest.raises(Cancelled):
            await stream.completion()


async def test_cancel_wakes_a_reader_that_waits(fake: Any) -> None:
    """cancel() from another task ends an iteration that waits for the next event."""
    fake.delta_seconds = 30.0
    async with AsyncClient(fake.target) as client:
        stream = client.stream("hi", max_tokens=5)

        async def read() -> list[Any]:
            return [event async for event in stream]

        reader = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        stream.cancel()
        events = await asyncio.wait_for(reader, 5)
    assert [type(event) for event in events] == [Started, Delta]


async def test_leaving_the_block_frees_the_request(fake: Any) -> None:
    """An exception inside `async with` cancels the call at the service."""
    fake.delta_seconds = 0.02
    async with AsyncClient(fake.target) as client:
        with pytest.raises(RuntimeError, match="reader"):
            async with client.stream("hi", max_tokens=1000) as stream:
                await anext(stream)
                raise RuntimeError("the reader broke")
        assert await asyncio.to_thread(fake.cancelled.wait, 5)


async def test_cancelling_the_task_cancels_the_call(fake: Any) -> None:
    """A cancelled task stays cancelled, and the service hears of it."""
    fake.delta_seconds = 0.02
    async with AsyncClient(fake.target) as client:
        task = asyncio.create_task(client.generate("hi", max_tokens=1000))
        await asyncio.sleep(0.15)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.cancelled.wait, 5)


async def test_invalid_argument_names_field_and_bound(fake: Any, wire: Any) -> None:
    """BadRequest details become .field and .bound, ErrorInfo .reason and .metadata."""
    fake.failures = [
        wire.Failure(
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling.temperature must be between 0 and 100",
            started=False,
            details=(
                wire.violation("sampling.temperature", "between 0 and 100"),
                wire.info("OUT_OF_BOUNDS", got="101"),
            ),
        )
    ]
    async with AsyncClient(fake.target) as client:
        with pytest.raises(InvalidArgument, match="between 0 and 100") as caught:
            await client.generate("hi", temperature=101.0)
    assert caught.value.field == "sampling.temperature"
    assert caught.value.bound == "between 0 and 100"
    assert caught.value.reason == "OUT_OF_BOUNDS"
    assert caught.value.metadata == {"got": "101"}
    assert len(fake.requests) == 1


async def test_never_fits_is_not_retried(fake: Any, wire: Any) -> None:
    """FAILED_PRECONDITION is NeverFits at once: waiting would not help."""
    fake.failures = [wire.Failure(grpc.StatusCode.FAILED_PRECONDITION, started=False)] * 2
    async with AsyncClient(fake.target, retry=QUICK) as client:
        with pytest.raises(NeverFits):
            await client.generate("hi")
    assert len(fake.requests) == 1


async def test_overload_waits_as_long_as_the_service_says(fake: Any, wire: Any) -> None:
    """RESOURCE_EXHAUSTED is retried, no sooner than its RetryInfo."""
    fake.failures = [
        wire.Failure(
            grpc.StatusCode.RESOURCE_EXHAUSTED, started=False, details=(wire.retry_info(0.4),)
        )
    ]
    async with AsyncClient(fake.target, retry=QUICK) as client:
        begin = time.monotonic()
        completion = await client.generate("hi", max_tokens=2)
    assert time.monotonic() - begin >= 0.4
    assert completion.token_ids == (1, 2)
    assert len(fake.requests) == 2


async def test_overload_is_reported_after_max_attempts(fake: Any, wire: Any) -> None:
    """Retries are bounded, and the last error carries retry_after."""
    failure = wire.Failure(
        grpc.StatusCode.RESOURCE_EXHAUSTED, started=False, details=(wire.retry_info(0.05),)
    )
    fake.failures = [failure] * 10
    async with AsyncClient(fake.target, retry=RetryPolicy(max_attempts=3)) as client:
        with pytest.raises(Overloaded) as caught:
            await client.generate("hi")
    assert caught.value.retry_after == pytest.approx(0.05)
    assert len(fake.requests) == 3


async def test_a_policy_may_leave_overload_to_the_caller(fake: Any, wire: Any) -> None:
    """Then a full queue is told at once; an absent service and a broken stream are retried."""
    policy = RetryPolicy(
        initial_backoff_seconds=0.01, max_backoff_seconds=0.02, retries_overload=False
    )
    full = wire.Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, started=False)
    away = wire.Failure(grpc.StatusCode.UNAVAILABLE, started=False)
    async with AsyncClient(fake.target, retry=policy) as client:
        fake.failures = [full]
        with pytest.raises(Overloaded):
            await client.generate("hi", max_tokens=2)
        assert len(fake.requests) == 1
        fake.failures = [away]
        assert (await client.generate("hi", max_tokens=2)).token_ids == (1, 2)
        fake.failures = [wire.Failure(grpc.StatusCode.UNAVAILABLE, after_deltas=1), full]
        assert (await client.generate("hi", max_tokens=3)).token_ids == (1, 2, 3)
        fake.unary_failures = [full]
        with pytest.raises(Overloaded):
            await client.tokenize("hi")


async def test_a_delay_past_the_deadline_is_not_waited_for(fake: Any, wire: Any) -> None:
    """If the service's delay ends after the deadline, the error is raised at once."""
    fake.failures = [
        wire.Failure(
            grpc.StatusCode.RESOURCE_EXHAUSTED, started=False, details=(wire.retry_info(60),)
        )
    ]
    async with AsyncClient(fake.target) as client:
        begin = time.monotonic()
        with pytest.raises(Overloaded):
            await client.generate("hi", timeout=5)
    assert time.monotonic() - begin < 2


async def test_broken_stream_resumes_without_gap_or_repeat(fake: Any, wire: Any) -> None:
    """After UNAVAILABLE mid-stream the call is made again with the tokens received."""
    broken = grpc.StatusCode.UNAVAILABLE
    fake.failures = [
        wire.Failure(broken, after_deltas=5),
        wire.Failure(broken, started=False),  # the new replica is not ready yet
        wire.Failure(broken, after_deltas=4),
    ]
    async with AsyncClient(fake.target, retry=QUICK) as client:
        stream = client.stream("hi", n=2, max_tokens=6, request_id="mine")
        events = [event async for event in stream]
    numbers = {0: [], 1: []}
    for event in events:
        if isinstance(event, Delta):
            numbers[event.index] += event.token_ids
    assert numbers == {0: [1, 2, 3, 4, 5, 6], 1: [101, 102, 103, 104, 105, 106]}
    assert sum(isinstance(event, Started) for event in events) == 1
    assert sum(isinstance(event, Finished) for event in events) == 2
    last = fake.requests[-1]
    assert {choice.index: list(choice.token_ids) for choice in last.resume} == {
        0: [1, 2, 3, 4, 5],
        1: [101, 102, 103, 104],
    }
    assert last.sampling.seed == wire.seed
    assert len({request.request_id for request in fake.requests}) == 4
    assert all(request.text == "hi" and request.n == 2 for request in fake.requests)


async def test_resume_survives_a_drain_that_finishes_its_choices(fake: Any, wire: Any) -> None:
    """A choice that a draining service ends as cancelled, before UNAVAILABLE, goes on."""
    fake.failures = [
        wire.Failure(
            grpc.StatusCode.UNAVAILABLE,
            after_deltas=2,
            before_status=(wire.finished(0, 2, 3),),  # FINISH_REASON_CANCELLED
        )
    ]
    async with AsyncClient(fake.target, retry=QUICK) as client:
        completion = await client.generate("hi", max_tokens=4)
    assert completion.token_ids == (1, 2, 3, 4)
    assert completion.choices[0].finish_reason is FinishReason.LENGTH


async def test_a_call_cancelled_by_the_service_resumes(fake: Any, wire: Any) -> None:
    """CANCELLED that we did not ask for (a server torn down) counts as a broken stream."""
    fake.failures = [wire.Failure(grpc.StatusCode.CANCELLED, after_deltas=1)]
    async with AsyncClient(fake.target, retry=QUICK) as client:
        assert (await client.generate("hi", max_tokens=3)).token_ids == (1, 2, 3)


async def test_losing_only_the_usage_is_no_error(fake: Any, wire: Any) -> None:
    """If every choice was finished when the stream broke, the answer stands."""
    fake.failures = [wire.Failure(grpc.StatusCode.UNAVAILABLE, after_deltas=4)]
    async with AsyncClient(fake.target, retry=QUICK) as client:
        completion = await client.generate("hi", max_tokens=3)
    assert completion.token_ids == (1, 2, 3)
    assert completion.usage.num_completion_tokens == 3
    assert len(fake.requests) == 1


async def test_resuming_gives_up_after_its_bound(fake: Any, wire: Any) -> None:
    """A stream without progress for resume_seconds reports the break."""
    fake.failures = [
        wire.Failure(grpc.StatusCode.UNAVAILABLE, after_deltas=1),
        *[wire.Failure(grpc.StatusCode.UNAVAILABLE, started=False)] * 1000,
    ]
    policy = RetryPolicy(resume_seconds=0.2, initial_backoff_seconds=0.01, max_backoff_seconds=0.02)
    async with AsyncClient(fake.target, retry=policy) as client:
        with pytest.raises(Unavailable, match="scripted"):
            await client.generate("hi", max_tokens=4)
    assert len(fake.requests) > 5


async def test_an_error_after_tokens_is_not_resumed(fake: Any, wire: Any) -> None:
    """INTERNAL (a poison request) ends the stream: resuming would crash it again."""
    fake.failures = [wire.Failure(grpc.StatusCode.INTERNAL, "poison", after_deltas=1)]
    async with AsyncClient(fake.target, retry=QUICK) as client:
        with pytest.raises(Internal, match="poison"):
            await client.generate("hi", max_tokens=4)
    assert len(fake.requests) == 1


async def test_a_truncated_stream_is_an_error(fake: Any, wire: Any) -> None:
    """A stream that ends well but without its Finished is not taken for an answer."""
    fake.override = lambda request: [wire.delta(0, 0)]
    async with AsyncClient(fake.target) as client:
        with pytest.raises(Internal, match="before every choice"):
            await client.generate("hi", max_tokens=4)


async def test_deadline_ends_a_slow_stream(fake: Any) -> None:
    """The timeout is a deadline for the whole stream, and the service hears of it."""
    fake.delta_seconds = 0.05
    async with AsyncClient(fake.target) as client:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await client.generate("hi", max_tokens=1000, timeout=0.3)
        assert time.monotonic() - begin < 2
        assert await asyncio.to_thread(fake.cancelled.wait, 5)


async def test_nothing_listening_is_connection_failed() -> None:
    """A refused connection says where, and what to start."""
    async with AsyncClient("127.0.0.1:1", retry=QUICK) as client:
        with pytest.raises(ConnectionFailed, match=r"127\.0\.0\.1:1.*octavo serve"):
            await client.model()


async def test_unary_calls_retry_while_unavailable(fake: Any, wire: Any) -> None:
    """Calls that the service refused as UNAVAILABLE are made again."""
    fake.unary_failures = [wire.Failure(grpc.StatusCode.UNAVAILABLE)] * 2
    async with AsyncClient(fake.target, retry=QUICK) as client:
        assert await client.tokenize("ab") == (97, 98)
    assert fake.num_unary_calls == 3


async def test_token_bytes_are_one_per_token(fake: Any) -> None:
    """Parts of a character come as they are."""
    fake.token_bytes = {200: b"\xc3", 201: b"\xa9"}
    async with AsyncClient(fake.target) as client:
        parts = await client.token_bytes([104, 200, 201])
    assert parts == (b"h", b"\xc3", b"\xa9")


async def test_tokenize_detokenize_model_health(fake: Any) -> None:
    """The small calls return plain values."""
    async with AsyncClient(fake.target) as client:
        assert await client.tokenize(messages=[Message("user", "ab")]) == (97, 98)
        assert await client.detokenize([104, 105]) == "hi"
        model = await client.model()
        assert (model.model, model.max_model_len, model.eos_token_ids) == ("fake", 512, (2,))
        assert await client.health() is Health.SERVING


async def test_watch_yields_snapshots_until_closed(fake: Any) -> None:
    """Watch turns the pool's state into values, again and again."""
    state = fake.snapshot.executors.add(address="a:1", connected=True)
    state.pool.num_total, state.pool.num_free = 64, 60
    state.counters.num_steps = 9
    async with AsyncClient(fake.target) as client:
        seen = []
        async for snapshot in client.watch(interval=0.02):
            seen.append(snapshot)
            if len(seen) == 3:
                break
        once = await client.snapshot()
    assert seen == [once] * 3
    assert once.executors[0].pool.num_free == 60
    assert once.executors[0].counters.num_steps == 9


async def test_streams_run_side_by_side(fake: Any) -> None:
    """Many streams of one client are at the service at the same time."""
    fake.delta_seconds = 0.05
    async with AsyncClient(fake.target) as client:
        begin = time.monotonic()
        answers = await asyncio.gather(*(client.generate("x", max_tokens=4) for _ in range(20)))
    assert all(answer.token_ids == (1, 2, 3, 4) for answer in answers)
    assert time.monotonic() - begin < 20 * 4 * 0.05 / 2
    assert threading.active_count() < 20


async def test_on_retry_is_called_once_per_outage(fake: Any, wire: Any) -> None:
    """Two failures in a row are one outage; one after new tokens is another."""
    cut = wire.Failure(grpc.StatusCode.UNAVAILABLE, after_deltas=1)
    refused = wire.Failure(grpc.StatusCode.UNAVAILABLE, started=False)
    fake.failures = [cut, refused, cut]
    told: list[Exception] = []
    async with AsyncClient(fake.target, retry=QUICK, on_retry=told.append) as client:
        completion = await client.generate("hi", max_tokens=4)
    assert completion.token_ids == (1, 2, 3, 4)
    assert len(told) == 2
