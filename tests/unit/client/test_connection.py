"""Tests of octavo_client._connection: TLS, keys, and where they may travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from octavo_client import (
    AsyncClient,
    Client,
    InvalidArgument,
    OctavoError,
    PermissionDenied,
    Unauthenticated,
)
from octavo_client._channel import parse_target
from octavo_client._connection import Connection, ConnectionSettings
from octavo_client.cli import main

from tests.support.certificates import Authority

REMOTE = "octavo.example:50051"
VARIABLES = ("API_KEY", "CA_FILE", "CERT_FILE", "KEY_FILE", "ALLOW_INSECURE_KEY")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(f"OCTAVO_{name}", raising=False)


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    return Authority().write(tmp_path)


class Recorder(grpc.GenericRpcHandler):
    """A server that knows no method, and notes which key came with which call."""

    def __init__(self) -> None:
        self.keys: dict[str, str | None] = {}
        self.target = ""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> None:
        """Note the call; None: the client is told that there is no such method."""
        sent = dict(handler_call_details.invocation_metadata or ())
        method = handler_call_details.method.rpartition("/")[2]
        self.keys[method] = sent.get("authorization")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder()
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(made,))
    made.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield made
    server.stop(None).wait()


def connection(target: str = "127.0.0.1:1", **options: Any) -> Connection:
    return Connection(ConnectionSettings(target, **options))


def is_secure(made: Connection) -> bool:
    """Whether it opens a channel with credentials."""
    return bool(made.open(lambda *_, **__: False, lambda *_, **__: True))


def sent(made: Connection, api_key: str | None = None) -> dict[str, str]:
    return dict(made.metadata(api_key))


def test_tls_is_what_the_target_or_the_ca_says(ca: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """grpcs://, ca_file or OCTAVO_CA_FILE turn it on; grpc:// keeps it off."""
    assert not is_secure(connection())
    assert is_secure(connection("grpcs://a:1"))
    assert is_secure(connection("a:1", ca_file=ca))
    assert is_secure(connection("dns:///a:1", ca_file=str(ca)))
    monkeypatch.setenv("OCTAVO_CA_FILE", str(ca))
    assert is_secure(connection("a:1"))
    assert not is_secure(connection("a:1", ca_file=""))
    assert not is_secure(connection("grpc://a:1"))
    assert is_secure(connection("a:1", credentials=grpc.ssl_channel_credentials()))


def test_the_environment_has_certificate_and_key(
    tmp_path: Path, ca: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors name the variable then; without TLS they mean nothing."""
    cert, key = Authority().issue().write(tmp_path)
    monkeypatch.setenv("OCTAVO_CERT_FILE", str(cert))
    assert not is_secure(connection("a:1"))
    with pytest.raises(InvalidArgument, match=r"^OCTAVO_CERT_FILE: needs key_file too"):
        connection("a:1", ca_file=ca)
    monkeypatch.setenv("OCTAVO_KEY_FILE", str(key))
    assert is_secure(connection("a:1", ca_file=ca))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cert_file": "x"}, "cert_file"),
        ({"key_file": "x"}, "key_file"),
        ({"server_name": "x"}, "server_name"),
        ({"target": "grpc://a:1", "ca_file": "x"}, "ca_file"),
        ({"target": "grpcs://a:1", "ca_file": "/no/such/file"}, "ca_file"),
        ({"target": "grpcs://a:1", "cert_file": "/no/such/file"}, "cert_file"),
        ({"credentials": grpc.ssl_channel_credentials(), "ca_file": "x"}, "ca_file"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], field: str) -> None:
    """The error names the parameter."""
    with pytest.raises(InvalidArgument) as caught:
        connection(**{"target": "a:1", **options})
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


def test_a_key_is_a_bearer_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call's own, the client's, the environment's, in this order; "" is none."""
    assert sent(connection()) == {}
    monkeypatch.setenv("OCTAVO_API_KEY", "octavo-env\n")
    assert sent(connection()) == {"authorization": "Bearer octavo-env"}
    assert sent(connection(api_key="")) == {}
    made = connection(api_key="octavo-own")
    assert sent(made) == {"authorization": "Bearer octavo-own"}
    assert sent(made, "octavo-call") == {"authorization": "Bearer octavo-call"}
    assert sent(made, "") == {}


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel", "tab\t", "x" * 5000])
def test_what_is_no_key_is_refused_and_not_shown(key: str) -> None:
    """GRPC itself would show it in its own error."""
    with pytest.raises(InvalidArgument, match=r"^api_key must be") as caught:
        connection(api_key=key)
    assert key not in str(caught.value)


def test_a_key_leaves_this_machine_only_encrypted(
    ca: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the caller allows it; a client without a key may go anywhere."""
    for options in ({"api_key": "k"}, {"api_key": "k", "target": f"dns:///{REMOTE}"}):
        with pytest.raises(InvalidArgument, match="sent over TLS"):
            connection(**{"target": REMOTE, **options})
    made = connection(REMOTE)
    with pytest.raises(InvalidArgument, match="sent over TLS"):
        made.metadata("k")
    for target, options in (
        (REMOTE, {"ca_file": ca}),
        (f"grpcs://{REMOTE}", {}),
        (REMOTE, {"allow_insecure_key": True}),
        ("127.0.0.1:1", {}),
        ("127.9.9.9:1", {}),
        ("localhost:1", {}),
        ("[::1]:1", {}),
        ("unix:/tmp/socket", {}),
        ("ipv4:127.0.0.1:1,127.0.0.2:1", {}),
    ):
        assert sent(connection(target, api_key="k", **options))
    monkeypatch.setenv("OCTAVO_ALLOW_INSECURE_KEY", "1")
    assert sent(connection(REMOTE, api_key="k"))
    monkeypatch.setenv("OCTAVO_ALLOW_INSECURE_KEY", "0")
    with pytest.raises(InvalidArgument):
        connection("ipv4:127.0.0.1:1,10.0.0.1:1", api_key="k")


def test_loopback_is_not_what_only_looks_like_it() -> None:
    """A name may point anywhere."""
    for target in (
        "127.0.0.1.example:1",
        "localhost.example:1",
        "0.0.0.0:1",
        "[::]:1",
        "10.0.0.1:1",
    ):
        assert not parse_target(target).is_loopback


SENT = {
    "Generate": "Bearer own",
    "Tokenize": "Bearer own",
    "Detokenize": None,
    "GetModel": "Bearer other",
    "Snapshot": "Bearer own",
    "Watch": "Bearer own",
    "Check": "Bearer own",
}


async def test_every_call_sends_a_key(recorder: Recorder) -> None:
    """The client's, or the call's own."""
    async with AsyncClient(recorder.target, api_key="own") as client:
        for call in (
            client.generate("hi", max_tokens=1),
            client.tokenize("a"),
            client.detokenize([97], api_key=""),
            client.model(api_key="other"),
            client.snapshot(),
            anext(client.watch()),
            client.health(),
        ):
            with suppress(OctavoError):
                await call
        assert recorder.keys == SENT
        with suppress(OctavoError):
            await client.generate("hi", max_tokens=1, api_key="other")
        assert recorder.keys["Generate"] == "Bearer other"


def test_the_blocking_client_sends_a_key_too(recorder: Recorder) -> None:
    """With every call."""
    with Client(recorder.target, api_key="own") as client:
        calls: tuple[Callable[[], object], ...] = (
            lambda: client.generate("hi", max_tokens=1),
            lambda: client.tokenize("a"),
            lambda: client.detokenize([97], api_key=""),
            lambda: client.model(api_key="other"),
            client.snapshot,
            lambda: next(client.watch()),
            client.health,
        )
        for call in calls:
            with suppress(OctavoError):
                call()
    assert recorder.keys == SENT


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated, "API_KEY_UNKNOWN"),
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDenied, "ADMIN_ONLY"),
    ],
)
def test_refused_keys_are_errors_at_once(
    fake: Any, wire: Any, code: grpc.StatusCode, kind: type[Exception], reason: str
) -> None:
    """They are not retried: the same key will not do better the next time."""
    failure = wire.Failure(code, "no", details=(wire.info(reason),), started=False)
    fake.failures, fake.unary_failures = [failure] * 3, [failure] * 3
    with Client(fake.target) as client:
        with pytest.raises(kind) as caught:
            client.generate("hi", max_tokens=1)
        assert caught.value.reason == reason  # type: ignore[attr-defined]
        with pytest.raises(kind):
            client.model()
    assert (len(fake.failures), len(fake.unary_failures)) == (2, 2)


def test_the_command_reads_a_key_from_a_file(
    recorder: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty one is an error that names the flag."""
    path = tmp_path / "key"
    path.write_text("octavo-file\n")
    arguments = ["generate", "hi", "--raw", "--max-tokens", "1", "--target", recorder.target]
    main([*arguments, "--api-key-file", str(path)])
    assert recorder.keys == {"Generate": "Bearer octavo-file"}
    path.write_text("\n")
    capsys.readouterr()
    assert main([*arguments, "--api-key-file", str(path)]) == 2
    assert "--api-key-file" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["bench"]])
def test_commands_take_certificates(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file is named before anything is connected to; no flag takes a key itself."""
    assert main([*command, "--ca-file", "/no/such/file"]) == 2
    assert "--ca-file" in capsys.readouterr().err
    assert main([*command[:1], "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in ("--ca-file", "--cert-file", "--key-file", "--server-name", "--api-key-file"):
        assert flag in shown
    assert "--api-key " not in shown
