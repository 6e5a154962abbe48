from __future__ import annotations

from typing import Any

import pytest
from octavo.v1 import inference_pb2
from octavo_client import Beam, InvalidArgument, Message
from octavo_client._channel import parse_target
from octavo_client._protocol import build_generate
from octavo_client._types import GenerateParams


def _leaves(message: Any, prefix: str = "") -> set[str]:
    """Paths of every field below a message, as they are on the wire."""
    paths = set()
    for field in message.DESCRIPTOR.fields:
        path = f"{prefix}{field.name}"
        inner = field.message_type
        if inner is not None and not inner.GetOptions().map_entry and not field.is_repeated:
            paths |= _leaves(getattr(message, field.name), f"{path}.")
        else:
            paths.add(path)
    return paths


def test_every_field_of_the_wire_has_a_parameter() -> None:
    """All of GenerateRequest can be said through the client, but for resume (it does that)."""
    values: dict[str, Any] = {
        "logit_bias": {5: 1.5},
        "allowed_token_ids": [7],
        "stop": "END",
        "stop_token_ids": [8],
        "beam": Beam(2, 0.5, True),
        **dict.fromkeys(("request_id", "model", "tenant", "cache_salt"), "x"),
        **dict.fromkeys(
            ("include_stop", "ignore_eos", "omit_text", "echo", "keep_special_tokens"), True
        ),
        "cache_disable": True,
    }
    params = {name: values.get(name, 1) for name in GenerateParams.__annotations__}
    request = build_generate("hi", None, None, params)  # type: ignore[arg-type]
    filled = set()
    for path in _leaves(inference_pb2.GenerateRequest()):
        value: Any = request
        for name in path.split("."):
            value = getattr(value, name)
        if value:
            filled.add(path)
    unfilled = _leaves(inference_pb2.GenerateRequest()) - filled
    assert unfilled == {"resume", "tokens.ids", "chat.messages"}


def test_what_is_not_given_is_not_sent() -> None:
    """An unset parameter leaves its field unset, so that the model's default holds."""
    request = build_generate("hi", None, None, {"temperature": 0.0})
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert not request.stopping.HasField("max_tokens")
    assert not request.HasField("beam")


@pytest.mark.parametrize(
    ("prompt", "tokens", "messages"),
    [(None, None, None), ("hi", [1], None), ("hi", None, [Message("user", "x")])],
)
def test_exactly_one_prompt(prompt: Any, tokens: Any, messages: Any) -> None:
    """None, or two kinds of prompt, is refused before any call."""
    with pytest.raises(InvalidArgument) as caught:
        build_generate(prompt, tokens, messages, {})
    assert caught.value.field == "prompt"


def test_an_empty_prompt_is_the_services_to_refuse() -> None:
    """Empty is not absent: the service decides about its bounds."""
    assert build_generate("", None, None, {}).WhichOneof("prompt") == "text"
    assert build_generate(None, [], None, {}).WhichOneof("prompt") == "tokens"
    assert build_generate(None, None, [], {}).WhichOneof("prompt") == "chat"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"max_tokens": -5}, "stopping.max_tokens"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"stop": [7]}, "stopping.stop"),
        ({"stop_token_ids": [-1]}, "stopping.stop_token_ids"),
        ({"logit_bias": {-1: 0.5}}, "sampling.logit_bias"),
        ({"tenant": "\ud800"}, "tenant"),
    ],
)
def test_values_that_do_not_fit_name_their_field(params: Any, field: str) -> None:
    """What protobuf cannot hold is an InvalidArgument with the field's path."""
    with pytest.raises(InvalidArgument) as caught:
        build_generate("hi", None, None, params)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"seed": -5}, f"sampling.seed must be from 0 to {2**64 - 1}, got -5"),
        ({"seed": 2**64}, f"sampling.seed must be from 0 to {2**64 - 1}, got {2**64}"),
        ({"max_tokens": -1}, f"stopping.max_tokens must be from 0 to {2**32 - 1}, got -1"),
        ({"priority": 2**31}, f"priority must be from {-(2**31)} to {2**31 - 1}, got {2**31}"),
    ],
)
def test_whole_numbers_name_their_bounds(params: Any, said: str) -> None:
    """Protobuf says only that a value is out of range."""
    with pytest.raises(InvalidArgument) as caught:
        build_generate("hi", None, None, params)
    assert str(caught.value) == said


def test_unknown_parameters_are_type_errors() -> None:
    """A misspelt parameter is not ignored."""
    with pytest.raises(TypeError, match="temprature"):
        build_generate("hi", None, None, {"temprature": 1.0})  # type: ignore[typeddict-unknown-key]


def test_messages_may_be_mappings() -> None:
    """Mappings with role and content are as good as Messages; others are named."""
    request = build_generate(None, None, [{"role": "user", "content": "hi"}], {})
    assert request.chat.messages[0].content == "hi"
    with pytest.raises(InvalidArgument) as caught:
        build_generate(None, None, [Message("user", "a"), {"role": "user"}], {})
    assert caught.value.field == "chat.messages[1]"


@pytest.mark.parametrize(
    ("given", "target", "tls"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50051", None),
        ("grpc://host:1", "host:1", False),
        ("grpcs://host:443/", "host:443", True),
        ("[::1]:7", "[::1]:7", None),
        ("dns:///octavo.default:50051", "dns:///octavo.default:50051", None),
        ("unix:/run/octavo.sock", "unix:/run/octavo.sock", None),
        ("10.0.0.1:1,10.0.0.2:2", "ipv4:10.0.0.1:1,10.0.0.2:2", None),
        ("grpc://10.0.0.1:1, 10.0.0.2:2", "ipv4:10.0.0.1:1,10.0.0.2:2", False),
        ("grpcs://[::1]:1,[fe80::2]:2", "ipv6:[::1]:1,[fe80::2]:2", True),
    ],
)
def test_targets(given: str, target: str, tls: bool | None) -> None:
    """Plain, grpc:// and grpcs:// addresses, and gRPC's own forms; most say nothing of TLS."""
    address = parse_target(given)
    assert (address.target, address.tls) == (target, tls)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "host",
        "host:port",
        "http://host:1",
        "host:1/path",
        "a:99999",
        "10.0.0.1:1,",
        "10.0.0.1:1,10.0.0.2",
        "a:1,10.0.0.2:1",
        "localhost:1,127.0.0.1:2",
        "10.0.0.1:1,[::1]:1",
    ],
)
def test_bad_targets(given: str) -> None:
    """What is no address of ours is refused at once, naming target."""
    with pytest.raises(InvalidArgument) as caught:
        parse_target(given)
    assert caught.value.field == "target"
