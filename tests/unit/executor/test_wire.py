"""Protobuf to plain values and back: every field arrives under its own name."""

from __future__ import annotations

import dataclasses

import pytest
from octavo.v1 import executor_pb2 as pb
from octavo.v1 import types_pb2

from executor_svc.errors import InvalidPlan
from executor_svc.plan import (
    Outcome,
    Plan,
    Position,
    RowLogprobs,
    StepError,
    StepErrorKind,
    Timings,
)
from executor_svc.wire import description_to_proto, plan_from_proto, result_to_proto
from tests.unit.executor.test_ownership import DESCRIPTION


def full_sampling() -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=2,
        seed=2**64 - 1,
        logit_bias={7: 1.5},
        allowed_token_ids=[4, 5],
    )


def test_every_list_of_a_plan_arrives() -> None:
    """Distinct values put into every packed list come out under the same name."""
    message = pb.StepPlan(epoch=2, step_id=9)
    lists = [
        field.name
        for field in pb.StepPlan.DESCRIPTOR.fields
        if field.is_repeated and field.message_type is None
    ]
    for number, name in enumerate(lists):
        getattr(message, name).extend([100 + number, 200 + number])
    plan = plan_from_proto(message)
    for number, name in enumerate(lists):
        assert getattr(plan, name) == [100 + number, 200 + number], name
    assert (plan.epoch, plan.step_id) == (2, 9)


def test_every_field_of_a_start_arrives() -> None:
    """A row's start and its sampling keep every value, and unset stays unset."""
    start = pb.RowStart(
        row=1,
        tokens=[4, 5, 6],
        num_prompt_tokens=2,
        num_computed_tokens=1,
        blocks=[8],
        sampling=full_sampling(),
        sample_index=3,
        num_logprobs=0,
        num_beam_candidates=5,
        min_tokens=6,
        stop_token_ids=[9],
        lineage=2**63,
    )
    (read,) = plan_from_proto(pb.StepPlan(starts=[start])).starts
    values = dataclasses.asdict(read)
    sampling = values.pop("sampling")
    assert values == {
        "row": 1,
        "tokens": [4, 5, 6],
        "num_prompt_tokens": 2,
        "num_computed_tokens": 1,
        "blocks": [8],
        "sample_index": 3,
        "num_logprobs": 0,
        "num_prompt_logprobs": None,
        "num_beam_candidates": 5,
        "min_tokens": 6,
        "stop_token_ids": [9],
        "lineage": 2**63,
    }
    assert sampling == {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 2.0,
        "seed": 2**64 - 1,
        "logit_bias": {7: 1.5},
        "allowed_token_ids": [4, 5],
    }


def test_table_updates_arrive() -> None:
    """An update keeps where it begins and whether it truncates."""
    update = pb.TableUpdate(row=3, first_logical_block=2, blocks=[5, 6], truncate=True)
    (read,) = plan_from_proto(pb.StepPlan(table_updates=[update])).table_updates
    assert dataclasses.astuple(read) == (3, 2, [5, 6], True)


@pytest.mark.parametrize(
    "name",
    [field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields if not field.is_repeated],
)
def test_an_unset_sampling_value_is_named(name: str) -> None:
    """A scalar that the scheduler forgot is an error, never a silent default."""
    sampling = full_sampling()
    sampling.ClearField(name)  # type: ignore[arg-type]
    plan = pb.StepPlan(starts=[pb.RowStart(row=4, tokens=[1], sampling=sampling)])
    with pytest.raises(InvalidPlan, match=f"row 4 has sampling.{name} unset"):
        plan_from_proto(plan)


def test_a_result_keeps_everything() -> None:
    """Tokens, log-probabilities, row errors and timings are written as they are."""
    result = result_to_proto(
        Outcome(
            epoch=1,
            step_id=2,
            tokens=[3, 4],
            logprobs=[
                RowLogprobs(5, Position(3, -0.5, [3, 9], [-0.5, -1.0]), [Position(8, -2.0)]),
                RowLogprobs(6, None, [Position(1, -4.0)]),
            ],
            row_errors=[(7, "why")],
            timings=Timings(1, 2, 3, 4, 5, 6),
        )
    )
    assert (result.epoch, result.step_id, list(result.tokens)) == (1, 2, [3, 4])
    first, second = result.logprobs
    assert (first.sampled.chosen.token_id, first.sampled.chosen.logprob) == (3, -0.5)
    assert [(top.token_id, top.logprob) for top in first.sampled.top] == [(3, -0.5), (9, -1.0)]
    assert first.prompt[0].chosen.token_id == 8
    assert not second.HasField("sampled")
    assert (result.row_errors[0].row, result.row_errors[0].message) == (7, "why")
    assert not result.HasField("error")
    for name in {field.name for field in dataclasses.fields(Timings)} - {"begin_ns"}:
        assert getattr(result.timings, name) == getattr(Timings(1, 2, 3, 4, 5, 6), name)


@pytest.mark.parametrize("kind", StepErrorKind)
def test_every_error_kind_has_its_number(kind: StepErrorKind) -> None:
    """A step's error is sent as the enum value of its own name."""
    result = result_to_proto(Outcome(error=StepError(kind, "m")))
    assert result.error.kind == pb.StepError.Kind.Value(f"KIND_{kind.name}")
    assert result.error.message == "m"


def test_plan_has_no_field_that_the_wire_lacks() -> None:
    """But for the mark of an unreadable message, and the message, a plan is its fields."""
    on_wire = {field.name for field in pb.StepPlan.DESCRIPTOR.fields}
    ours = {field.name for field in dataclasses.fields(Plan)}
    assert ours - {"broken", "encode"} == on_wire - {"claim", "previous_step_id", "traceparent"}


def test_a_description_says_who_owns_and_who_asks() -> None:
    """What the model is and what changes by the second stand in one message."""
    written = description_to_proto(
        DESCRIPTION, instance="i", epoch=3, owner="b", schedulers=["a", "b"], draining=True
    )
    assert written.instance == "i"
    assert (written.epoch, written.owner, written.draining) == (3, "b", True)
    assert list(written.schedulers) == ["a", "b"]
    assert (written.model, written.fingerprint, written.block_size) == ("m", "abc", 16)
