"""Tests of scheduler_svc.api.codec."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.v1 import inference_pb2

from scheduler_svc.api.codec import Malformed, deserializer

PARSE = deserializer(inference_pb2.GenerateRequest)
BAD = "abc\x00def"  # replaced by bytes that are no UTF-8, of the same length


def broken(request: inference_pb2.GenerateRequest) -> bytes:
    return request.SerializeToString().replace(BAD.encode(), b"abc\xffdef")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"text": BAD}, "text"),
        ({"request_id": BAD, "text": "x"}, "request_id"),
        ({"stopping": {"stop": ["ok", BAD]}}, "stopping.stop[1]"),
        ({"chat": {"messages": [{"role": "user"}, {"content": BAD}]}}, "chat.messages[1].content"),
        ({"cache": {"salt": BAD}}, "cache.salt"),
        ({"sampling": {"logit_bias": {1: 1.0}}, "tenant": BAD}, "tenant"),
    ],
)
def test_bad_utf8_names_its_field(fields: dict[str, object], path: str) -> None:
    """The path leads through messages and lists; the byte's place in the string is told."""
    parsed = PARSE(broken(inference_pb2.GenerateRequest(**fields)))  # type: ignore[arg-type]  # by field names
    assert isinstance(parsed, Malformed)
    assert parsed.error.field == path
    assert str(parsed.error) == f"{path} must be valid UTF-8, got a bad byte at offset 3"


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (b"\x1a\x05ab", "request"),  # text says 5 bytes, has 2
        (b"\x1a", "request"),
        (b"\x80" * 11, "request"),
        (b"\x07", "request"),  # there is no wire type 7
        (b"\x3a\x01\x0a", "stopping"),
        (b"\x00\x00", "request"),  # there is no field 0
    ],
)
def test_broken_framing_names_its_message(data: bytes, path: str) -> None:
    """Bytes that are no message at all are INVALID_ARGUMENT as well."""
    parsed = PARSE(data)
    assert isinstance(parsed, Malformed)
    assert parsed.error.field == path


def test_unknown_fields_are_ignored() -> None:
    """A request of a newer client is served as far as it is known."""
    data = inference_pb2.GenerateRequest(text="hi").SerializeToString()
    parsed = PARSE(data + b"\xfa\x3f\x02\xff\xfe")  # field 1023: two bytes
    assert isinstance(parsed, inference_pb2.GenerateRequest)
    assert parsed.text == "hi"


@given(st.binary(max_size=60))
def test_no_bytes_make_it_raise(data: bytes) -> None:
    """Any bytes give a message or a Malformed with a field."""
    parsed = PARSE(data)
    if isinstance(parsed, Malformed):
        assert parsed.error.field


@given(st.integers(0, 200), st.binary(min_size=1, max_size=3))
def test_no_damage_makes_it_raise(place: int, noise: bytes) -> None:
    """Neither do damaged messages, however deep the damage is."""
    whole = inference_pb2.GenerateRequest(
        chat={"messages": [{"role": "user", "content": "hello"}] * 5},
        stopping={"stop": ["a", "b"]},
        resume=[{"index": 1, "token_ids": [1, 2, 3]}],
    ).SerializeToString()
    damaged = whole[:place] + noise + whole[place + len(noise) :]
    parsed = PARSE(damaged)
    if isinstance(parsed, Malformed):
        assert parsed.error.field


def test_the_search_is_bounded() -> None:
    """A megabyte of tiny fields before the bad one does not hold up the loop."""
    data = b"\x3a\x02\x1a\x00" * 250_000 + b"\x1a\x01\xff"
    begin = time.perf_counter()
    assert isinstance(PARSE(data), Malformed)
    assert time.perf_counter() - begin < 0.5
