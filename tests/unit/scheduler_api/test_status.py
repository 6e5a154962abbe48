"""Tests of scheduler_svc.api.status."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from scheduler_svc import errors
from scheduler_svc.api import status

CASES = [
    (errors.InvalidArgument("n", "at most 64", 65), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.UnknownModel("no"), grpc.StatusCode.NOT_FOUND),
    (errors.DuplicateRequest("twice"), grpc.StatusCode.ALREADY_EXISTS),
    (errors.NeverFits("large"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.QueueFull("full", 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.TenantLimit("t", "max", 3, 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.ApiKeyMissing("none"), grpc.StatusCode.UNAUTHENTICATED),
    (errors.ApiKeyUnknown("unknown"), grpc.StatusCode.UNAUTHENTICATED),
    (errors.TenantMismatch("t"), grpc.StatusCode.PERMISSION_DENIED),
    (errors.AdminOnly("admin"), grpc.StatusCode.PERMISSION_DENIED),
    (errors.Unavailable("draining"), grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.OctavoError("unforeseen"), grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("error", "code"), CASES)
def test_each_error_has_its_code_and_reason(
    error: errors.OctavoError, code: grpc.StatusCode
) -> None:
    """The code is DESIGN's, the message the error's, and an ErrorInfo names the reason."""
    made = status.from_error(error)
    assert rpc_status.to_status(made).code is code
    assert made.message == str(error)
    info = error_details_pb2.ErrorInfo()
    assert made.details[0].Unpack(info)
    assert info.domain == "octavo"
    assert info.reason


def test_a_bad_field_is_named() -> None:
    """INVALID_ARGUMENT carries a BadRequest with path, bound and value."""
    made = status.from_error(errors.InvalidArgument("sampling.top_p", "above 0, to 1", 2))
    bad = error_details_pb2.BadRequest()
    assert made.details[1].Unpack(bad)
    assert [violation.field for violation in bad.field_violations] == ["sampling.top_p"]
    assert bad.field_violations[0].description == "sampling.top_p must be above 0, to 1, got 2"


def test_a_full_queue_says_when_to_come_back() -> None:
    """RESOURCE_EXHAUSTED carries the delay in seconds and nanoseconds."""
    made = status.from_error(errors.QueueFull("full", 1.5))
    retry = error_details_pb2.RetryInfo()
    assert made.details[1].Unpack(retry)
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (1, 500_000_000)


def test_a_limit_is_named_and_says_when_to_come_back() -> None:
    """The limit and its value are facts for programs, the delay is exact."""
    made = status.from_error(errors.TenantLimit("acme", "max_requests_per_minute", 60, 0.25))
    assert made.message == "tenant 'acme' has reached its max_requests_per_minute of 60"
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert made.details[0].Unpack(info) and made.details[1].Unpack(retry)
    assert info.reason == "TENANT_LIMIT"
    assert dict(info.metadata) == {"limit": "max_requests_per_minute", "value": "60"}
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (0, 250_000_000)


def test_a_wrong_tenant_is_named_as_a_field() -> None:
    """PERMISSION_DENIED carries a BadRequest, too."""
    made = status.from_error(errors.TenantMismatch("acme"))
    bad = error_details_pb2.BadRequest()
    assert made.details[1].Unpack(bad)
    assert [violation.field for violation in bad.field_violations] == ["tenant"]


def test_subclasses_follow_their_base() -> None:
    """A new kind of a known error needs no entry of its own."""

    class Busy(errors.Unavailable):
        pass

    assert rpc_status.to_status(status.from_error(Busy("x"))).code is grpc.StatusCode.UNAVAILABLE


def test_messages_fit_into_headers() -> None:
    """However long the client's own value is, the status stays small."""
    made = status.from_error(errors.InvalidArgument("model", "known", "x" * 100_000))
    assert made.ByteSize() < 4096


def test_internal_names_the_request_and_nothing_else() -> None:
    """The request id leads to the log; no stack trace travels."""
    made = status.internal("internal error", "req-1")
    info = error_details_pb2.ErrorInfo()
    assert made.details[0].Unpack(info)
    assert dict(info.metadata) == {"request_id": "req-1"}
