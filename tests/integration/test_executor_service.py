"""The executor's service over real gRPC: claims, fencing, order, errors, health."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_reflection.v1alpha import reflection_pb2
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import types_pb2
from transformers import LlamaForCausalLM

from executor_svc.executor import Executor
from executor_svc.server import SERVICE
from tests.integration.executor_rig import PROMPT, WAIT, Running, Stream, config, refusal, row_start


async def test_a_claim_is_answered_by_the_description(running: Running) -> None:
    """The first result says what the executor is, and Describe says who owns it."""
    stream = await running.claim(4)
    result = await stream.read()
    assert (result.epoch, result.step_id) == (4, 0)
    described = await running.stub.Describe(pb.DescribeRequest())
    assert described == result.description
    assert (described.owner, described.epoch) == ("s4", 4)
    assert (described.block_size, described.num_device_blocks) == (16, 32)
    assert (described.vocab_size, described.max_model_len) == (97, 128)


async def test_tokens_over_the_wire_equal_generate(running: Running, folder: Path) -> None:
    """A prompt and its decode steps give plain transformers' greedy tokens."""
    stream = await running.claim(1)
    await stream.read()
    result = await stream.step(starts=[row_start()], chunk_rows=[0], chunk_counts=[5])
    tokens = list(result.tokens)
    for step in range(9):
        result = await stream.step(decode_enter_rows=[0] if step == 0 else [])
        assert result.step_id == step + 2
        tokens += result.tokens
    model = LlamaForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([PROMPT])
    expected = model.generate(prompt, max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert tokens == expected[0, 5:].tolist()


async def test_plans_may_be_sent_ahead(running: Running) -> None:
    """Results come in order for plans sent without waiting, as many as there are."""
    stream = await running.claim(1)
    await stream.send(starts=[row_start()], chunk_rows=[0], chunk_counts=[5])
    await stream.send(decode_enter_rows=[0])
    for _ in range(20):
        await stream.send()
    await stream.call.done_writing()
    results = [await stream.read() for _ in range(23)]
    assert [result.step_id for result in results] == list(range(23))
    assert all(len(result.tokens) == 1 for result in results[1:])
    assert await stream.call.read() is grpc.aio.EOF
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_higher_epoch_takes_over(running: Running) -> None:
    """The old owner's stream ends with STALE_EPOCH and its rows are gone."""
    old = await running.claim(1)
    await old.read()
    await old.step(starts=[row_start()], chunk_rows=[0], chunk_counts=[5])
    new = await running.claim(2)
    await new.read()
    code, reason, message = await old.refusal()
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
    assert "s2 took epoch 2" in message
    result = await new.step(starts=[row_start()], chunk_rows=[0], chunk_counts=[5])
    assert len(result.tokens) == 1
    assert (await running.stub.Describe(pb.DescribeRequest())).owner == "s2"


async def test_an_old_epoch_cannot_claim(running: Running) -> None:
    """A claim with an epoch seen before is refused and the owner goes on."""
    owner = await running.claim(5)
    await owner.read()
    for epoch in (4, 5):
        code, reason, message = await (await running.claim(epoch)).refusal()
        assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")
        assert f"epoch {epoch} is not above 5" in message
    assert (await owner.step()).step_id == 1


@pytest.mark.parametrize("expected", [{"fingerprint": "other"}, {"block_size": 32}])
async def test_a_mismatch_is_refused_at_the_claim(
    running: Running, expected: dict[str, Any]
) -> None:
    """Another model or block size is refused with both fingerprints in the message."""
    code, reason, message = await (await running.claim(1, **expected)).refusal()
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_MISMATCH")
    described = await running.stub.Describe(pb.DescribeRequest())
    assert described.fingerprint in message
    assert str(next(iter(expected.values()))) in message
    assert described.owner == ""
    matching = {"fingerprint": described.fingerprint, "block_size": described.block_size}
    assert (await (await running.claim(1, **matching)).read()).HasField("description")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"step_id": 1, "previous_step_id": 0}, "OUT_OF_ORDER"),  # repeated
        ({"step_id": 3, "previous_step_id": 2}, "OUT_OF_ORDER"),  # one lost
        ({"claim": pb.Claim(scheduler_id="again")}, "OUT_OF_ORDER"),
    ],
)
async def test_lost_and_repeated_plans_end_the_stream(
    running: Running, fields: dict[str, Any], reason: str
) -> None:
    """The stream ends after the results of the plans before, and frees the executor."""
    stream = await running.claim(1)
    await stream.read()
    await stream.send()
    await stream.send(**fields)
    assert (await stream.read()).step_id == 1
    code, told, _ = await stream.refusal()
    assert (code, told) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
    assert (await running.stub.Describe(pb.DescribeRequest())).owner == ""


async def test_a_stream_must_begin_with_a_claim(running: Running) -> None:
    """A plan without a claim before it is refused."""
    stream = Stream(running.stub, 1)
    await stream.send()
    code, reason, _ = await stream.refusal()
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "OUT_OF_ORDER")


@pytest.mark.parametrize("epoch", [0, 2**62, 2**64 - 1])
async def test_an_absurd_epoch_cannot_claim(running: Running, epoch: int) -> None:
    """An epoch that would lock out every later claimant is refused; others may claim."""
    code, reason, message = await (await running.claim(epoch)).refusal()
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert f"epoch {epoch}" in message
    assert (await (await running.claim(1)).read()).description.epoch == 1


BAD_BYTES = b"\x0a\xff"


def as_bytes(message: bytes) -> bytes:
    return message


@pytest.mark.parametrize("method", ["Describe", "Audit"])
async def test_bytes_that_are_no_message_are_refused(
    running: Running, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A malformed request is INVALID_ARGUMENT, and no traceback is logged."""
    async with grpc.aio.insecure_channel(running.server.address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}", request_serializer=as_bytes)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(BAD_BYTES)
    code, reason, message = refusal(caught.value)
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert f"not a well-formed {method}Request" in message
    assert not caplog.records


async def test_a_malformed_plan_ends_the_stream(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """As a claim or later it is INVALID_ARGUMENT, after the results of the plans before."""
    async with grpc.aio.insecure_channel(running.server.address) as channel:
        call = channel.stream_stream(
            f"/{SERVICE}/Run",
            request_serializer=as_bytes,
            response_deserializer=pb.StepResult.FromString,
        )
        claim = pb.StepPlan(epoch=1, claim=pb.Claim(scheduler_id="s")).SerializeToString()
        for before in ([], [claim]):
            stream = call()
            for data in (*before, BAD_BYTES):
                await stream.write(data)
            for _ in before:
                assert (await asyncio.wait_for(stream.read(), WAIT)).HasField("description")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asyncio.wait_for(stream.read(), WAIT)
            code, reason, message = refusal(caught.value)
            assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
            assert "not a well-formed StepPlan" in message
    assert not caplog.records
    assert (await running.stub.Describe(pb.DescribeRequest())).owner == ""


async def test_an_invalid_plan_is_answered_until_the_next_claim(running: Running) -> None:
    """The stream stays, every later plan gets the same error, a new claim starts afresh."""
    stream = await running.claim(1)
    await stream.read()
    sampling_unset = row_start(sampling=types_pb2.SamplingParams(temperature=0))
    failed = await stream.step(starts=[sampling_unset], chunk_rows=[0], chunk_counts=[5])
    assert failed.error.kind == pb.StepError.KIND_INVALID_PLAN
    assert "sampling.top_k" in failed.error.message
    assert (await stream.step()).error == failed.error
    assert not (await running.stub.Audit(pb.AuditRequest())).rows
    again = await running.claim(2)
    await again.read()
    assert not (await again.step(starts=[row_start()])).HasField("error")


async def test_the_sanitizer_reports_both_owners(start: Callable[..., Any], folder: Path) -> None:
    """With kv_check a wrong prefix hit is KIND_KV_CHECK, and a new claim is served."""
    checked = Executor.load(config(kv_check=True), folder)
    running = await start(lambda: checked)
    prefill = {"chunk_rows": [0], "chunk_counts": [5]}
    stream = await running.claim(1)
    await stream.read()
    first = await stream.step(starts=[row_start(0, lineage=0xA)], **prefill)
    assert len(first.tokens) == 1
    thief = row_start(1, lineage=0xB, num_computed_tokens=4)
    failed = await stream.step(starts=[thief], chunk_rows=[1], chunk_counts=[1])
    assert failed.error.kind == pb.StepError.KIND_KV_CHECK
    assert failed.error.message == (
        "row 1 (lineage 0xb) reads position 0 from block 2, offset 0, which holds position 0 "
        "of row 0 (lineage 0xa), written in step 1; wrong slots in this step: 4"
    )
    again = await running.claim(2)
    await again.read()
    healed = await again.step(starts=[row_start(0, lineage=0xA)], **prefill)
    assert healed.tokens == first.tokens


async def test_audit_digests_tables_and_lengths(running: Running) -> None:
    """Rows come with their lengths and the checksum of their table's words."""
    stream = await running.claim(1)
    await stream.read()
    await stream.step(
        starts=[row_start(7, blocks=[20, 3]), row_start(2)], chunk_rows=[7], chunk_counts=[5]
    )
    audit = await running.stub.Audit(pb.AuditRequest())
    assert (audit.epoch, audit.step_id) == (1, 1)
    assert [(row.row, row.num_tokens, row.num_computed_tokens) for row in audit.rows] == [
        (2, 5, 0),
        (7, 6, 5),
    ]
    assert audit.rows[1].table_crc32 == zlib.crc32(struct.pack("<2I", 20, 3))


async def test_an_owner_that_goes_frees_the_executor(running: Running) -> None:
    """After a cancelled stream nobody owns it, and a higher epoch may claim at once."""
    stream = await running.claim(1)
    await stream.read()
    stream.call.cancel()
    async with asyncio.timeout(WAIT):
        while (await running.stub.Describe(pb.DescribeRequest())).owner:  # likewise
            await asyncio.sleep(0.01)
    assert (await (await running.claim(2)).read()).description.owner == "s2"


async def test_health_and_reflection(running: Running) -> None:
    """Standard tools can ask whether it serves and what it offers."""
    assert await running.health("") == await running.health() == "SERVING"
    call = running.reflection_stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    async for answer in call:
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names
        break
