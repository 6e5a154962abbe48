"""Tests of octavo.probe: SERVING is 0, all else is 1 and one line."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from octavo.probe import main

from tests.support.certificates import Authority

STATUS = health_pb2.HealthCheckResponse
NAME = "executor.llm.svc.cluster.local"


@dataclass
class Server:
    """A gRPC server whose health a test sets."""

    port: int
    health: health.HealthServicer

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def serve(credentials: grpc.ServerCredentials | None) -> Iterator[Server]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = "127.0.0.1:0"
    port = (
        server.add_insecure_port(address)
        if credentials is None
        else server.add_secure_port(address, credentials)
    )
    server.start()
    yield Server(port, servicer)
    server.stop(None).wait()


@pytest.fixture
def plain() -> Iterator[Server]:
    yield from serve(None)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A CA and a certificate of it for NAME, as a pod has them."""
    authority = Authority()
    cert, key = authority.issue(NAME).write(tmp_path)
    ca = authority.write(tmp_path)
    return {"--ca-file": str(ca), "--cert-file": str(cert), "--key-file": str(key)}


@pytest.fixture
def mutual(files: dict[str, str]) -> Iterator[Server]:
    ca, cert, key = (Path(path).read_bytes() for path in files.values())
    yield from serve(
        grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=True),
    )


def arguments(server: Server, files: dict[str, str], **others: str) -> list[str]:
    given = {**files, "--server-name": NAME, "--timeout": "5", **others}
    return [server.address, *(word for pair in given.items() for word in pair)]


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("octavo.probe: ")
    return err


def test_a_server_that_serves(plain: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 0, and not a word."""
    plain.health.set("", STATUS.SERVING)
    assert main([plain.address]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_server_that_does_not_serve(plain: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1, and what it said."""
    plain.health.set("", STATUS.NOT_SERVING)
    assert main([plain.address]) == 1
    assert complaint(capsys).endswith("NOT_SERVING\n")


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1, and gRPC's own word."""
    assert main(["127.0.0.1:1", "--timeout", "5"]) == 1
    assert "UNAVAILABLE" in complaint(capsys)


def test_mutual_tls_by_the_name_in_the_certificate(mutual: Server, files: dict[str, str]) -> None:
    """The pod's own certificate opens its port, though it is not for 127.0.0.1."""
    mutual.health.set("", STATUS.SERVING)
    assert main(arguments(mutual, files)) == 0


def test_another_name_is_refused(
    mutual: Server, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A certificate counts only under its own name."""
    mutual.health.set("", STATUS.SERVING)
    assert main(arguments(mutual, files, **{"--server-name": "other.example"})) == 1
    assert "UNAVAILABLE" in complaint(capsys)


def test_without_a_certificate_it_is_not_let_in(
    mutual: Server, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's demand for a certificate holds for probes."""
    mutual.health.set("", STATUS.SERVING)
    assert main(arguments(mutual, {"--ca-file": files["--ca-file"]})) == 1
    assert "UNAVAILABLE" in complaint(capsys)


def test_a_file_that_is_not_there(plain: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is named."""
    assert main([plain.address, "--ca-file", "nowhere.crt"]) == 1
    assert "nowhere.crt: No such file" in complaint(capsys)
