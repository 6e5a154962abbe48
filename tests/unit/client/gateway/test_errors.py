"""Tests of octavo_gateway.errors and .names: the scheduler's refusals in OpenAI's form."""

from __future__ import annotations

import pytest
from octavo_client import errors as octavo
from octavo_gateway.errors import from_octavo, translated
from octavo_gateway.names import FieldNames

NAMES = FieldNames()
TABLE = [
    (octavo.NeverFits("big"), 400, "invalid_request_error", "context_length_exceeded"),
    (octavo.Unauthenticated("who"), 401, "authentication_error", "invalid_api_key"),
    (octavo.PermissionDenied("no"), 403, "permission_error", "permission_denied"),
    (octavo.NotFound("m"), 404, "invalid_request_error", "model_not_found"),
    (octavo.AlreadyExists("id"), 409, "invalid_request_error", "request_id_in_use"),
    (octavo.Overloaded("full"), 429, "rate_limit_error", "rate_limit_exceeded"),
    (octavo.Unavailable("away"), 503, "server_error", "unavailable"),
    (octavo.ConnectionFailed("away"), 503, "server_error", "unavailable"),
    (octavo.Cancelled("away"), 503, "server_error", "unavailable"),
    (octavo.DeadlineExceeded("late"), 504, "server_error", "deadline_exceeded"),
    (octavo.Internal("bug"), 500, "server_error", "internal_error"),
    (octavo.OctavoError("other"), 500, "server_error", "internal_error"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), TABLE)
def test_each_error_has_its_status(
    error: octavo.OctavoError, status: int, kind: str, code: str
) -> None:
    """Status, type and code are one row; the message is the scheduler's own."""
    told = from_octavo(error, NAMES)
    assert (told.status, told.kind, told.code) == (status, kind, code)
    assert told.body["error"]["message"] == str(error)


@pytest.mark.parametrize(
    ("given", "header"), [(None, "1"), (0.2, "1"), (2.0, "2"), (2.1, "3"), (59.9, "60")]
)
def test_who_may_come_back_is_told_when(given: float | None, header: str) -> None:
    """In whole seconds, never sooner than the scheduler says."""
    for error in (
        octavo.Overloaded("full", retry_after=given),
        octavo.Unavailable("away", retry_after=given),
    ):
        assert from_octavo(error, NAMES).headers["retry-after"] == header
    assert "retry-after" not in from_octavo(octavo.DeadlineExceeded("late"), NAMES).headers


def test_a_message_that_no_channel_takes_is_too_large() -> None:
    """The transport's refusal will not change, however often it is asked."""
    error = octavo.Overloaded("Received message larger than max (5 vs. 4)")
    assert from_octavo(error, NAMES).status == 413
    full = octavo.Overloaded("prompt larger than max", reason="QUEUE_FULL")
    assert from_octavo(full, NAMES).status == 429


@pytest.mark.parametrize(
    ("names", "path", "param"),
    [
        (NAMES, "sampling.temperature", "temperature"),
        (NAMES, "sampling.logit_bias[7]", "logit_bias[7]"),
        (NAMES, "stopping.stop[0]", "stop[0]"),
        (NAMES, "stopping.max_tokens", "max_tokens"),
        (NAMES, "stopping.include_stop", "include_stop_str_in_output"),
        (NAMES, "output.prompt_logprobs", "prompt_logprobs"),
        (NAMES, "beam.length_penalty", "length_penalty"),
        (NAMES, "cache.salt", "cache_salt"),
        (NAMES, "n", "n"),
        (NAMES, "text", "prompt"),
        (NAMES, "tokens.ids[3]", "prompt[3]"),
        (NAMES.for_prompt(2), "tokens.ids[3]", "prompt[2][3]"),
        (FieldNames("messages"), "chat.messages[1].role", "messages[1].role"),
        (FieldNames("messages"), "chat", "messages"),
        (FieldNames(renamed={"beam.width": "best_of"}), "beam.width", "best_of"),
    ],
)
def test_fields_have_the_callers_names(names: FieldNames, path: str, param: str) -> None:
    """In the parameter and at the head of the message."""
    error = octavo.InvalidArgument(f"{path} must be good, got bad", field=path, bound="good")
    told = from_octavo(error, names)
    assert told.status == 400
    assert told.body == {
        "error": {
            "message": f"{param} must be good, got bad",
            "type": "invalid_request_error",
            "param": param,
            "code": None,
        }
    }


def test_a_prompt_that_is_too_long_has_a_code() -> None:
    """Clients that shorten prompts look for it."""
    for field in ("text", "stopping.max_tokens"):
        error = octavo.InvalidArgument(f"{field} must be at most 5 (the context is 6)", field=field)
        assert from_octavo(error, NAMES).code == "context_length_exceeded"


def test_a_missing_model_is_named() -> None:
    """As OpenAI does it; 401 says how to authenticate."""
    assert from_octavo(octavo.NotFound("x"), NAMES).param == "model"
    told = from_octavo(octavo.Unauthenticated("x"), NAMES)
    assert told.headers["www-authenticate"] == "Bearer"


def test_other_exceptions_pass_through() -> None:
    """Only what the SDK raises is the scheduler's word."""
    with pytest.raises(ZeroDivisionError), translated(NAMES):
        raise ZeroDivisionError
