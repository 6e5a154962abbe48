"""API keys over a real port: every refusal, the tenant rule, limits, changes while running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from octavo.v1 import inference_pb2
from octavo_client import (
    NO_RETRIES,
    AsyncClient,
    DeadlineExceeded,
    Health,
    InvalidArgument,
    OctavoError,
    Overloaded,
    PermissionDenied,
    RetryPolicy,
    Unauthenticated,
)
from structlog.testing import capture_logs

from scheduler_svc.security.key_file import add_key, revoke_key
from tests.integration.secured_rig import PROMPT, WAIT, Secured, rest_of, serving
from tests.integration.test_engine_over_wire import expected


@dataclass
class Keyed:
    """A scheduler with a file of keys: one of tenant a, one of b, one for administration."""

    path: Path
    keys: dict[str, str] = field(default_factory=dict)
    secured: Secured | None = None

    def add(self, name: str, tenant: str, *, admin: bool = False) -> str:
        """Make a key."""
        self.keys[name] = add_key(self.path, name=name, tenant=tenant, admin=admin)
        return self.keys[name]

    def limit(self, tenant: str, **limits: int) -> None:
        """Append a tenant's limits to the file."""
        lines = [f"{name} = {value}" for name, value in limits.items()]
        text = self.path.read_text()
        self.path.write_text("\n".join([text, f"[tenants.{tenant}]", *lines, ""]))

    def connect(self, key: str = "", **options: Any) -> AsyncClient:
        """Connect with the key of a name, or with none."""
        assert self.secured is not None
        options = {"retry": NO_RETRIES, "timeout": WAIT, "unary_timeout": WAIT, **options}
        return AsyncClient(self.secured.target, api_key=self.keys.get(key, key), **options)


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[Keyed]:
    made = Keyed(tmp_path / "keys.toml")
    made.add("a", "tenant-a")
    made.add("b", "tenant-b")
    made.add("admin", "operators", admin=True)
    async with serving(tmp_path, api_keys=made.path) as secured:
        made.secured = secured
        yield made


async def every_call(client: AsyncClient) -> dict[str, str]:
    """Make every call of the client; give the reason of each refusal, "" for an answer."""

    async def watch() -> None:
        async for _ in client.watch():
            break

    calls = {
        "generate": lambda: client.generate(tokens=PROMPT, max_tokens=2),
        "tokenize": lambda: client.tokenize("ab"),
        "detokenize": lambda: client.detokenize(PROMPT),
        "model": client.model,
        "snapshot": client.snapshot,
        "watch": watch,
        "health": client.health,
    }
    reasons = {}
    for name, call in calls.items():
        try:
            await call()
            reasons[name] = ""
        except OctavoError as error:
            reasons[name] = error.reason
    return reasons


ADMIN_CALLS = {"snapshot", "watch"}


async def test_a_call_without_a_key_is_refused(keyed: Keyed) -> None:
    """All but the health check, which probes make."""
    async with keyed.connect() as client:
        reasons = await every_call(client)
    assert reasons.pop("health") == ""
    assert set(reasons.values()) == {"API_KEY_MISSING"}
    async with keyed.connect() as client:
        with pytest.raises(Unauthenticated, match="authorization: Bearer KEY"):
            await client.model()


async def test_an_unknown_key_is_refused_and_not_shown(keyed: Keyed) -> None:
    """Also one that is nearly right; the message does not repeat it."""
    for wrong in ("octavo-wrong", keyed.keys["a"][:-1], keyed.keys["a"] + "x"):
        async with keyed.connect(wrong) as client:
            reasons = await every_call(client)
            assert reasons.pop("health") == ""
            assert set(reasons.values()) == {"API_KEY_UNKNOWN"}
            with pytest.raises(Unauthenticated) as caught:
                await client.generate(tokens=PROMPT, max_tokens=1)
            assert wrong not in str(caught.value)


async def test_a_key_opens_all_but_administration(keyed: Keyed) -> None:
    """The AdminService shows every tenant's requests, so it takes an admin key."""
    async with keyed.connect("a") as client:
        reasons = await every_call(client)
    assert {name for name, reason in reasons.items() if reason} == ADMIN_CALLS
    assert {reasons[name] for name in ADMIN_CALLS} == {"ADMIN_ONLY"}
    async with keyed.connect("admin") as client:
        assert set((await every_call(client)).values()) == {""}


async def test_a_call_may_bring_its_own_key(keyed: Keyed) -> None:
    """It wins over the client's; an empty one sends none."""
    async with keyed.connect("a") as client:
        assert (await client.snapshot(api_key=keyed.keys["admin"])).scheduler_id
        with pytest.raises(Unauthenticated):
            await client.generate(tokens=PROMPT, max_tokens=1, api_key="")
        answer = await client.generate(
            tokens=PROMPT, max_tokens=1, tenant="tenant-b", api_key=keyed.keys["b"]
        )
        assert answer.choices


@pytest.mark.parametrize(
    "headers",
    [
        (("authorization", "KEY"),),
        (("authorization", "Basic KEY"),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer KEY"), ("authorization", "Bearer KEY")),
        (("x-api-key", "KEY"),),
    ],
)
async def test_other_forms_of_the_header_are_refused(
    keyed: Keyed, headers: tuple[tuple[str, str], ...]
) -> None:
    """Only one Bearer token counts, though its scheme may be written in any case."""
    assert keyed.secured is not None
    key = keyed.keys["a"]
    sent = tuple((name, value.replace("KEY", key)) for name, value in headers)
    request = inference_pb2.GetModelRequest().SerializeToString()
    async with grpc.aio.insecure_channel(keyed.secured.target) as channel:
        method = channel.unary_unary("/octavo.v1.InferenceService/GetModel")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(request, metadata=sent, timeout=WAIT)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await method(request, metadata=(("authorization", f"bearer {key}"),), timeout=WAIT)


async def test_reflection_needs_a_key(keyed: Keyed) -> None:
    """Any key; a stream that says nothing is refused at once, too."""
    assert keyed.secured is not None
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with grpc.aio.insecure_channel(keyed.secured.target) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ServerReflectionInfo(timeout=WAIT).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        header = (("authorization", f"Bearer {keyed.keys['a']}"),)
        call = stub.ServerReflectionInfo(iter([request]), metadata=header, timeout=WAIT)
        names = {found.name for found in (await call.read()).list_services_response.service}
    assert "octavo.v1.InferenceService" in names


async def test_a_large_request_without_a_key_is_not_read(keyed: Keyed) -> None:
    """It is refused for its key; that it is too large is never found out."""
    async with keyed.connect() as client:
        with pytest.raises(Unauthenticated):
            await client.generate("x" * 8_000_000, max_tokens=1)


async def test_the_key_decides_the_tenant(keyed: Keyed) -> None:
    """Named or not; another's name is refused with the field."""
    assert keyed.secured is not None
    engine = keyed.secured.engine
    engine.may_run.clear()
    async with keyed.connect("a") as client, keyed.connect("admin") as operator:
        with pytest.raises(PermissionDenied, match=r"^tenant must be") as caught:
            await client.generate(tokens=PROMPT, max_tokens=1, tenant="tenant-b")
        assert caught.value.reason == "TENANT_MISMATCH"
        streams = [
            client.stream(tokens=PROMPT, max_tokens=4, tenant=tenant) for tenant in ("", "tenant-a")
        ]
        for stream in streams:
            await anext(stream)
        seen = (await operator.snapshot(sequences=True)).executors[0].sequences
        assert [sequence.tenant for sequence in seen] == ["tenant-a"] * 2
        engine.may_run.set()
        for stream in streams:
            assert await rest_of(stream) == expected(PROMPT, 4)


async def test_tenants_share_no_cached_blocks(keyed: Keyed) -> None:
    """The prefix cache is salted with the key's tenant, not with what the request says."""
    prompt = list(range(3, 51))

    async def num_cached(key: str) -> int:
        async with keyed.connect(key) as client:
            answer = await client.generate(tokens=prompt, max_tokens=2)
            return answer.usage.cached_prompt_tokens

    assert await num_cached("a") == 0
    assert await num_cached("a") > 0
    assert await num_cached("b") == 0


async def test_a_revoked_key_is_refused_at_the_next_call(keyed: Keyed) -> None:
    """A stream in progress ends as it should; a new key works at once."""
    assert keyed.secured is not None
    engine = keyed.secured.engine
    engine.may_run.clear()
    async with keyed.connect("a") as client, client.stream(tokens=PROMPT, max_tokens=6) as stream:
        await anext(stream)
        revoke_key(keyed.path, "a")
        engine.may_run.set()
        with pytest.raises(Unauthenticated) as caught:
            await client.generate(tokens=PROMPT, max_tokens=1)
        assert caught.value.reason == "API_KEY_UNKNOWN"
        assert await rest_of(stream) == expected(PROMPT, 6)
    keyed.add("again", "tenant-a")
    async with keyed.connect("again") as client:
        assert (await client.generate(tokens=PROMPT, max_tokens=1)).choices


async def test_a_watch_ends_with_its_key(keyed: Keyed) -> None:
    """It would go on for ever otherwise, and show every tenant's requests."""
    async with keyed.connect("admin") as client:
        watcher = client.watch(interval=0.02)
        await anext(watcher)
        revoke_key(keyed.path, "admin")
        with pytest.raises(Unauthenticated) as caught:
            async with asyncio.timeout(WAIT):
                async for _ in watcher:
                    pass
    assert caught.value.reason == "API_KEY_UNKNOWN"


async def test_a_broken_file_of_keys_keeps_the_old_ones(keyed: Keyed) -> None:
    """A slip of an editor shuts nobody out, and lets nobody in."""
    text = keyed.path.read_text()
    keyed.path.write_text(text + "\n[[keys]")
    async with keyed.connect("a") as client:
        assert (await client.generate(tokens=PROMPT, max_tokens=1)).choices
    async with keyed.connect() as client:
        with pytest.raises(Unauthenticated):
            await client.model()


async def test_requests_a_minute_are_limited(keyed: Keyed) -> None:
    """The third is refused with the limit's name and the delay; other tenants are not."""
    keyed.limit("tenant-a", max_requests_per_minute=2)
    async with keyed.connect("a") as client:
        for _ in range(2):
            await client.generate(tokens=PROMPT, max_tokens=1)
        with pytest.raises(Overloaded, match="max_requests_per_minute of 2") as caught:
            await client.generate(tokens=PROMPT, max_tokens=1)
    error = caught.value
    assert error.reason == "TENANT_LIMIT"
    assert error.metadata == {"limit": "max_requests_per_minute", "value": "2"}
    assert error.retry_after is not None and 0 < error.retry_after <= 30
    async with keyed.connect("b") as client:
        for _ in range(3):
            await client.generate(tokens=PROMPT, max_tokens=1)


async def test_the_client_waits_as_it_is_told(keyed: Keyed) -> None:
    """With its usual retries a limit slows a client down instead of failing it."""
    keyed.limit("tenant-a", max_requests_per_minute=600)
    async with keyed.connect("a", retry=RetryPolicy(max_attempts=50)) as client:
        requests = [client.tokenize("ab") for _ in range(610)]
        assert len(await asyncio.gather(*requests)) == 610


async def test_tokens_a_minute_are_limited(keyed: Keyed) -> None:
    """Prompt and output both count, and a refusal costs neither a request nor a token."""
    keyed.limit("tenant-a", max_tokens_per_minute=20)
    async with keyed.connect("a") as client:
        await client.generate(tokens=PROMPT, max_tokens=7)
        with pytest.raises(Overloaded) as caught:
            await client.generate(tokens=[5] * 20, max_tokens=1)
        assert caught.value.metadata["limit"] == "max_tokens_per_minute"
        # Ten are left of twenty, and all are there again within half a minute.
        assert caught.value.retry_after is not None and 0 < caught.value.retry_after <= 30
        await client.generate(tokens=[5] * 9, max_tokens=1)


async def test_requests_at_once_are_limited_however_they_end(keyed: Keyed) -> None:
    """Finished, cancelled, refused: each gives its place back."""
    assert keyed.secured is not None
    engine = keyed.secured.engine
    keyed.limit("tenant-a", max_concurrent_requests=1)
    async with keyed.connect("a") as client:
        for end in ("cancel", "finish", "deadline"):
            engine.may_run.clear()
            timeout = 2.0 if end == "deadline" else WAIT
            async with client.stream(tokens=PROMPT, max_tokens=3, timeout=timeout) as stream:
                await anext(stream)
                with pytest.raises(Overloaded) as caught:
                    await client.generate(tokens=PROMPT, max_tokens=1)
                assert caught.value.metadata["limit"] == "max_concurrent_requests"
                assert caught.value.retry_after
                if end == "finish":
                    engine.may_run.set()
                    assert await rest_of(stream) == expected(PROMPT, 3)
                elif end == "deadline":
                    with pytest.raises(DeadlineExceeded):
                        await rest_of(stream)
            engine.may_run.set()
            await until_let_in(client)
        with pytest.raises(InvalidArgument):
            await client.generate(tokens=[], max_tokens=1)
        await until_let_in(client)


async def until_let_in(client: AsyncClient) -> None:
    """A cancelled call's place is free once the service knows of it."""
    async with asyncio.timeout(WAIT):
        while True:
            try:
                await client.generate(tokens=PROMPT, max_tokens=1)
                return
            except Overloaded:
                await asyncio.sleep(0.01)


async def test_a_call_that_the_service_refuses_costs_nothing(keyed: Keyed) -> None:
    """Invalid, of a wrong tenant, too long: the one request a minute is still there."""
    keyed.limit("tenant-a", max_requests_per_minute=1, max_tokens_per_minute=300)
    async with keyed.connect("a") as client:
        for bad in (
            {"tokens": []},
            {"tokens": PROMPT, "temperature": -1.0},
            {"tokens": [5] * 300},
            {"tokens": PROMPT, "tenant": "tenant-b"},
            {"tokens": PROMPT, "model": "other"},
        ):
            with pytest.raises(OctavoError):
                await client.generate(**bad, max_tokens=1)  # type: ignore[arg-type]
        assert (await client.generate(tokens=PROMPT, max_tokens=1)).choices


async def test_keys_may_come_as_a_text(keyed: Keyed, tmp_path: Path) -> None:
    """As of an environment variable, where there is no file."""
    text = keyed.path.read_text()
    other = tmp_path / "other"
    other.mkdir()
    async with serving(other, api_keys_inline=text) as secured:
        async with AsyncClient(secured.target, api_key=keyed.keys["a"]) as client:
            assert (await client.model()).model
            assert await client.health() in Health
        async with AsyncClient(secured.target, retry=NO_RETRIES) as client:
            with pytest.raises(Unauthenticated):
                await client.model()


@pytest.mark.parametrize(
    ("settings", "event"),
    [
        ({"api_keys_inline": "[tenants.default]", "insecure_bind": True}, "api_keys_exposed"),
        ({"insecure_bind": True}, "port_opened_to_anyone"),
        ({"listen": "127.0.0.1:0"}, ""),
    ],
)
async def test_a_port_that_others_reach_is_warned_of(
    tmp_path: Path, settings: dict[str, Any], event: str
) -> None:
    """Once, at start: of keys that travel unencrypted, and of a port that asks for nothing."""
    with capture_logs() as logs:
        async with serving(tmp_path, **{"listen": "0.0.0.0:0", **settings}):
            pass
    warned = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert warned == ([event] if event else [])


async def test_no_key_is_ever_logged(keyed: Keyed, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a good nor a bad one, on any path; names are."""
    wrong = "octavo-" + "w" * 43
    for key in ("a", wrong):
        async with keyed.connect(key) as client:
            await every_call(client)
    captured = capsys.readouterr()
    logged = captured.out + captured.err
    assert "call_refused" in logged
    assert "request_finished" in logged
    for key in (wrong, *keyed.keys.values()):
        assert key not in logged
        assert key.removeprefix("octavo-") not in logged
