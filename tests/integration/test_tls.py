"""TLS of both hops over real ports: who is let in, who is told why not, and rotation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from octavo_client import (
    NO_RETRIES,
    AsyncClient,
    Client,
    ConnectionFailed,
    Health,
    OctavoError,
    TlsFailed,
    Unavailable,
)

from executor_svc.errors import StartupError as ExecutorStartupError
from executor_svc.server import ExecutorServer
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.errors import StartupError
from scheduler_svc.server import SchedulerServer
from tests.integration.executor_rig import config
from tests.integration.secured_rig import PROMPT, WAIT, Secured, rest_of, serving, write_model
from tests.integration.test_engine_over_wire import FakeEngine, expected
from tests.support.certificates import Authority, Issued


@dataclass
class Files:
    """A CA and what it issued, where the services read them."""

    folder: Path
    authority: Authority
    ca: Path
    cert: Path
    key: Path

    @property
    def server(self) -> dict[str, Any]:
        """Settings of a port."""
        return {"tls_cert": self.cert, "tls_key": self.key}

    def rotate(self, issued: Issued) -> None:
        """Put another pair into the files' place."""
        issued.write(self.folder)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    authority = Authority()
    cert, key = authority.issue().write(tmp_path)
    return Files(tmp_path, authority, authority.write(tmp_path), cert, key)


@pytest.fixture
async def secured(files: Files) -> AsyncIterator[Secured]:
    async with serving(files.folder, **files.server) as running:
        yield running


def connect(target: str, **options: Any) -> AsyncClient:
    return AsyncClient(target, retry=NO_RETRIES, timeout=WAIT, unary_timeout=WAIT, **options)


async def greeted(target: str, **options: Any) -> bool:
    """Connect anew, and be answered."""
    async with connect(target, **options) as client:
        return await client.health() in Health


async def test_both_clients_generate_over_tls(secured: Secured, files: Files) -> None:
    """With the CA's file alone, or with grpcs:// and the CA's file."""
    async with connect(secured.target, ca_file=files.ca) as client:
        answer = await client.generate(tokens=PROMPT, max_tokens=5)
    assert list(answer.token_ids) == expected(PROMPT, 5)

    def blocking() -> list[int]:
        with Client(f"grpcs://{secured.target}", ca_file=str(files.ca)) as client:
            return list(client.generate(tokens=PROMPT, max_tokens=5).token_ids)

    assert await asyncio.to_thread(blocking) == expected(PROMPT, 5)


async def test_a_server_of_another_ca_is_not_trusted(secured: Secured, files: Files) -> None:
    """The error says what to mend; nothing is retried."""
    # Also one that has the same name, as that of another installation may.
    for other in (Authority("other"), Authority()):
        with pytest.raises(TlsFailed, match="no CA that the client trusts"):
            await greeted(secured.target, ca_file=other.write(files.folder, "other"))
    with pytest.raises(TlsFailed, match="no CA that the client trusts"):
        await greeted(f"grpcs://{secured.target}")  # by the public CAs


async def test_a_server_of_another_name_is_not_trusted(files: Files) -> None:
    """Unless the client is told which name to expect."""
    files.rotate(files.authority.issue("octavo.example"))
    async with serving(files.folder, **files.server) as secured:
        with pytest.raises(TlsFailed, match="another name"):
            await greeted(secured.target, ca_file=files.ca)
        assert await greeted(secured.target, ca_file=files.ca, server_name="octavo.example")
        with pytest.raises(TlsFailed, match="another name"):
            await greeted(secured.target, ca_file=files.ca, server_name="other.example")


async def test_plain_text_and_tls_do_not_meet(secured: Secured, files: Files) -> None:
    """Neither way round; the message speaks of TLS."""
    with pytest.raises(Unavailable, match="hangs up: does it speak TLS"):
        await greeted(secured.target)
    async with serving(files.folder) as plain:
        with pytest.raises(TlsFailed, match="does not speak TLS"):
            await greeted(plain.target, ca_file=files.ca)


async def test_mutual_tls_wants_a_certificate(files: Files) -> None:
    """One that the CA signed; none, or another CA's, is refused with a reason."""
    clients = Authority("clients")
    ca = clients.write(files.folder, "clients")
    cert, key = clients.issue("client").write(files.folder, "client")
    async with serving(files.folder, **files.server, tls_client_ca=ca) as secured:
        pair = {"ca_file": files.ca, "cert_file": cert, "key_file": key}
        assert await greeted(secured.target, **pair)
        with pytest.raises(Unavailable, match="want a certificate"):
            await greeted(secured.target, ca_file=files.ca)
        cert, key = Authority().issue("client").write(files.folder, "stranger")
        with pytest.raises(Unavailable, match="a CA that it knows"):
            await greeted(secured.target, ca_file=files.ca, cert_file=cert, key_file=key)
        assert await greeted(secured.target, **pair)


async def test_a_new_certificate_is_shown_without_restart(secured: Secured, files: Files) -> None:
    """New connections get it; a stream that began with the old one goes on to its end."""
    renewed = Authority("renewed")
    new_ca = renewed.write(files.folder, "new")
    secured.engine.may_run.clear()
    async with (
        connect(secured.target, ca_file=files.ca) as client,
        client.stream(tokens=PROMPT, max_tokens=20) as stream,
    ):
        await anext(stream)
        files.rotate(renewed.issue())
        assert await greeted(secured.target, ca_file=new_ca)
        with pytest.raises(TlsFailed):
            await greeted(secured.target, ca_file=files.ca)
        secured.engine.may_run.set()
        assert await rest_of(stream) == expected(PROMPT, 20)


async def test_a_broken_rotation_keeps_the_old_certificate(secured: Secured, files: Files) -> None:
    """Half a pair, garbage, nothing: connections go on, until a sound pair is there."""
    renewed = Authority("renewed")
    new_ca = renewed.write(files.folder, "new")
    issued = renewed.issue()
    files.cert.write_bytes(issued.cert)  # its key is still the old one
    assert await greeted(secured.target, ca_file=files.ca)
    files.cert.write_bytes(b"garbage")
    assert await greeted(secured.target, ca_file=files.ca)
    files.cert.unlink()
    assert await greeted(secured.target, ca_file=files.ca)
    files.rotate(issued)
    assert await greeted(secured.target, ca_file=new_ca)


async def test_the_client_ca_rotates_too(files: Files) -> None:
    """Who was let in by the old CA is not by the new one, and the other way round."""
    old, new = Authority("old clients"), Authority("new clients")
    ca = old.write(files.folder, "clients")
    pairs = []
    for name, authority in (("old", old), ("new", new)):
        cert, key = authority.issue("client").write(files.folder, name)
        pairs.append({"ca_file": files.ca, "cert_file": cert, "key_file": key})
    async with serving(files.folder, **files.server, tls_client_ca=ca) as secured:
        assert await greeted(secured.target, **pairs[0])
        new.write(files.folder, "clients")
        assert await greeted(secured.target, **pairs[1])
        with pytest.raises(OctavoError):
            await greeted(secured.target, **pairs[0])


async def test_the_scheduler_reaches_its_executor_by_mutual_tls(files: Files) -> None:
    """By the executor's name, with a certificate of its own; nobody else gets in."""
    files.rotate(files.authority.issue("executor.octavo.svc"))
    cert, key = files.authority.issue("scheduler").write(files.folder, "scheduler")
    executor = {**files.server, "tls_client_ca": files.ca}
    hop = {
        "executor_ca": files.ca,
        "executor_cert": cert,
        "executor_key": key,
        "executor_server_name": "executor.octavo.svc",
    }
    async with serving(files.folder, executor, **hop) as secured:
        async with connect(secured.target) as client:
            answer = await client.generate(tokens=PROMPT, max_tokens=5)
            assert list(answer.token_ids) == expected(PROMPT, 5)
        address = secured.scheduler.config.executors[0]
        options = {"ca_file": files.ca, "server_name": "executor.octavo.svc"}
        assert await greeted(address, **options, cert_file=cert, key_file=key)
        with pytest.raises(OctavoError):
            await greeted(address, **options)


async def test_the_scheduler_waits_for_an_executor_that_it_cannot_trust(files: Files) -> None:
    """It says why, stays up, and connects as soon as its CA file names the right CA."""
    ca = Authority("wrong").write(files.folder, "executors")
    below = ExecutorServer(config(**files.server), FakeEngine)
    await below.start()
    await below.wait_ready()
    model = write_model(files.folder / "model")
    settings = SchedulerConfig(
        model=str(model), listen="127.0.0.1:0", executors=(below.address,), executor_ca=ca
    )
    scheduler = SchedulerServer(settings)
    await scheduler.start()
    session = scheduler.engine.sessions[0]
    try:
        async with asyncio.timeout(WAIT):
            while "CERTIFICATE_VERIFY_FAILED" not in session.last_error:
                await asyncio.sleep(0.01)
            files.authority.write(files.folder, "executors")
            while not session.connected:
                await asyncio.sleep(0.01)
    finally:
        await scheduler.stop()
        await below.stop()


async def test_files_that_cannot_be_used_stop_the_start(files: Files) -> None:
    """Of either service, in one line that names the flag."""
    model = write_model(files.folder / "model")
    _, wrong = files.authority.issue().write(files.folder, "wrong")
    gone = files.folder / "gone"
    for settings, flag in (
        ({"tls_cert": files.cert, "tls_key": wrong}, "--tls-key"),
        ({**files.server, "tls_client_ca": gone}, "--tls-client-ca"),
        ({"executor_ca": files.key}, "--executor-ca"),
        ({"executor_ca": files.ca, "executor_cert": gone, "executor_key": gone}, "--executor-cert"),
        ({"api_keys": gone}, "--api-keys"),
        ({"api_keys_inline": "[[keys]"}, "--api-keys-inline"),
    ):
        with pytest.raises(StartupError, match=f"^{flag}: ") as caught:
            SchedulerServer(SchedulerConfig(model=str(model), **settings))
        assert "\n" not in str(caught.value)
    for settings, flag in (
        ({"tls_cert": files.cert, "tls_key": wrong}, "--tls-key"),
        ({**files.server, "tls_client_ca": gone}, "--tls-client-ca"),
    ):
        with pytest.raises(ExecutorStartupError, match=f"^{flag}: "):
            ExecutorServer(config(**settings), FakeEngine)


async def test_nothing_listens_is_still_told_as_such(files: Files) -> None:
    """A TLS client that finds no server does not speak of certificates."""
    with pytest.raises(ConnectionFailed, match="nothing answers"):
        await greeted("127.0.0.1:1", ca_file=files.ca)
