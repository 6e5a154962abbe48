"""Tests of the console over a scripted scheduler: its page, its watch, and their bounds."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

import grpc
import httpx
import pytest
from octavo.v1 import admin_pb2
from octavo_client import AsyncClient
from octavo_gateway.app import Gateway
from octavo_gateway.errors import ApiError
from octavo_gateway.exchange import ClientGone, Exchange
from octavo_gateway.watching import Watchers

from tests.unit.client.gateway.conftest import RETRIES

FOLDER = files("octavo_gateway").joinpath("console")
NAMES = sorted(each.name for each in FOLDER.iterdir() if not each.name.startswith("_"))


class Viewer:
    """One reader of /console/watch, by hand: it may stop reading, or hang up."""

    def __init__(self, gateway: Gateway, *, query: str = "interval_ms=100", key: str = "") -> None:
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.status = 0
        self.lines: list[Any] = []
        self.num_sent = 0
        self.came = asyncio.Event()
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/console/watch",
            "raw_path": b"/console/watch",
            "query_string": query.encode(),
            "headers": headers,
            "http_version": "1.1",
            "scheme": "http",
            "server": ("gateway", 80),
            "client": ("viewer", 1),
        }
        self.scope = scope
        self.task = asyncio.ensure_future(gateway.app(scope, self.receive, self.send))

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.num_sent += 1
        self.lines += [json.loads(line) for line in message["body"].splitlines()]
        self.came.set()
        await self.reads.wait()

    async def until(self, num_lines: int) -> None:
        async with asyncio.timeout(20):
            while len(self.lines) < num_lines:
                self.came.clear()
                await self.came.wait()

    async def leave(self) -> None:
        self.gone.set()
        await asyncio.wait_for(self.task, 20)


@asynccontextmanager
async def console(fake: Any, *, most: int = 2) -> AsyncIterator[Gateway]:
    """A gateway whose console so many may watch."""
    async with AsyncClient(fake.target, retry=RETRIES, api_key="") as client:
        yield Gateway(
            client,
            timeout=20,
            max_concurrent_requests=2,
            max_body_bytes=10_000,
            max_console_watchers=most,
        )


def http_of(gateway: Gateway) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=gateway.app)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def add_executor(fake: Any) -> None:
    executor = fake.snapshot.executors.add(address="e:1", connected=True)
    executor.blocks.kinds = b"\x02\x00"
    executor.blocks.ref_counts.extend([2, 0])
    executor.sequences.add(request_id="r", status="running", block_table=[0])


async def test_the_page_and_all_that_it_names_are_served(fake: Any) -> None:
    """HTML, style and modules, each with its type; what a file imports is there, too."""
    async with console(fake) as gateway, http_of(gateway) as http:
        page = await http.get("/console")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        named = set(re.findall(r'(?:href|src)="console/([^"]+)"', page.text))
        for name in NAMES:
            answer = await http.get(f"/console/{name}")
            assert answer.status_code == 200, name
            assert answer.content == FOLDER.joinpath(name).read_bytes()
            named |= set(re.findall(r"from '\./([^']+)'", answer.text))
        assert {"app.js", "style.css", "decode.js"} <= named <= set(NAMES)
        script = await http.get("/console/app.js")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"


async def test_the_page_is_confined(fake: Any) -> None:
    """Nothing but this origin's own files may load, and nothing inline runs."""
    async with console(fake) as gateway, http_of(gateway) as http:
        page = await http.get("/console")
    policy = dict(
        part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert page.headers["x-content-type-options"] == "nosniff"
    # What the policy would refuse is not there either.
    assert not re.search(r"<script(?![^>]* src=)|\son\w+=|\sstyle=|<style", page.text)
    for name in NAMES:
        text = FOLDER.joinpath(name).read_text(encoding="utf-8")
        addresses = set(re.findall(r"\w+://[^\s\"')]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name
        assert "innerHTML" not in text


async def test_a_path_that_is_no_file_is_404(fake: Any) -> None:
    """Nothing outside the folder is reached; the slash leads back to the page."""
    async with console(fake) as gateway, http_of(gateway) as http:
        for path in ("/console/app.py", "/console/..%2Fapp.py", "/console/x/app.js"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
        slash = await http.get("/console/")
        assert (slash.status_code, slash.headers["location"]) == (308, "../console")


async def test_without_console_there_is_none(fake: Any) -> None:
    """Neither page nor watch."""
    async with console(fake, most=0) as gateway, http_of(gateway) as http:
        for path in ("/console", "/console/app.js", "/console/watch"):
            assert (await http.get(path)).status_code == 404


async def test_a_watch_is_a_line_per_snapshot(fake: Any) -> None:
    """Until the reader hangs up; then the scheduler's watch ends, too."""
    add_executor(fake)
    async with console(fake) as gateway:
        viewer = Viewer(gateway)
        await viewer.until(3)
        assert viewer.status == 200
        first, second = viewer.lines[:2]
        assert first["executors"][0]["address"] == "e:1"
        assert first["executors"][0]["kinds"] == "AgA="
        assert "kinds" not in second["executors"][0]
        await viewer.leave()
        assert await asyncio.to_thread(fake.watches_ended.acquire, timeout=10)


async def test_the_callers_key_is_passed_on(fake: Any) -> None:
    """As it is, and none is lent to a caller without one."""
    async with console(fake) as gateway:
        for key in ("octavo-key", ""):
            viewer = Viewer(gateway, key=key)
            await viewer.until(1)
            await viewer.leave()
    assert fake.watch_authorizations == ["Bearer octavo-key", ""]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, 401),
        (grpc.StatusCode.PERMISSION_DENIED, 403),
        (grpc.StatusCode.UNAVAILABLE, 503),
    ],
)
async def test_what_the_scheduler_refuses_is_the_answer(
    fake: Any, wire: Any, code: grpc.StatusCode, status: int
) -> None:
    """Before the first line it is the status."""
    fake.watch_failures = [wire.Failure(code, "refused")]
    async with console(fake) as gateway:
        viewer = Viewer(gateway)
        await asyncio.wait_for(viewer.task, 20)
    assert viewer.status == status
    assert viewer.lines[0]["error"]["message"] == "refused"


async def test_a_watch_that_breaks_says_so_in_its_last_line(fake: Any, wire: Any) -> None:
    """A scheduler that goes away, a key that is revoked: the page reads it and acts."""
    fake.watch_failures = [wire.Failure(grpc.StatusCode.UNAUTHENTICATED, "revoked", after_deltas=2)]
    async with console(fake) as gateway:
        viewer = Viewer(gateway)
        await asyncio.wait_for(viewer.task, 20)
    assert viewer.status == 200
    assert [sorted(line)[0] for line in viewer.lines] == ["executors", "executors", "error"]
    assert viewer.lines[-1]["error"]["code"] == "invalid_api_key"


async def test_one_watcher_too_many_is_told_so(fake: Any) -> None:
    """503 with the bound; once another leaves there is room."""
    async with console(fake, most=2) as gateway, http_of(gateway) as http:
        viewers = [Viewer(gateway), Viewer(gateway)]
        for viewer in viewers:
            await viewer.until(1)
        refused = await http.get("/console/watch")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_watchers"
        assert "2 consoles" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]
        await viewers.pop().leave()
        viewers.append(Viewer(gateway))
        await viewers[-1].until(1)
        assert viewers[-1].status == 200
        for viewer in viewers:
            await viewer.leave()


@pytest.mark.parametrize("given", ["99", "60001", "-5", "1e3", "", "9" * 30, "\uff10"])
async def test_the_interval_is_bounded(fake: Any, given: str) -> None:
    """400, with parameter and bound."""
    async with console(fake) as gateway, http_of(gateway) as http:
        answer = await http.get("/console/watch", params={"interval_ms": given})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "interval_ms"
    assert "between 100 and 60000" in answer.json()["error"]["message"]


async def test_a_reader_that_stops_gets_one_line_and_is_left(fake: Any) -> None:
    """While it does not take a line none is made for it; after a while it is left."""
    add_executor(fake)
    async with AsyncClient(fake.target, retry=RETRIES, api_key="") as client:
        watchers = Watchers(client, most=1, send_seconds=0.5)
        async with console(fake) as gateway:
            viewer = Viewer(gateway)  # for its send and receive
            await viewer.leave()
            viewer.reads.clear()
            num_before = viewer.num_sent
            exchange = Exchange(viewer.scope, viewer.receive, viewer.send)
            with pytest.raises(ClientGone):
                await asyncio.wait_for(watchers.watch(exchange), 20)
            assert viewer.num_sent == num_before + 1
            assert watchers.num_watching == 0


async def test_draining_does_not_wait_for_watchers(fake: Any) -> None:
    """They are told, and end at once; requests in flight have their time all the same."""
    async with console(fake) as gateway:
        viewer = Viewer(gateway)
        await viewer.until(1)
        assert await gateway.gate.drain(20) == 0
        await asyncio.wait_for(viewer.task, 20)
        assert viewer.lines[-1]["error"]["code"] == "unavailable"
        late = Viewer(gateway)
        await asyncio.wait_for(late.task, 20)
        assert late.status == 503


async def test_a_silent_scheduler_is_given_up(fake: Any, monkeypatch: Any) -> None:
    """No snapshot within the interval and some seconds more: 504."""
    monkeypatch.setattr("octavo_gateway.watching._SILENCE_SECONDS", -0.05)
    async with AsyncClient(fake.target, retry=RETRIES, api_key="") as client:
        watchers = Watchers(client, most=1)
        async with console(fake) as gateway:
            viewer = Viewer(gateway)
            await viewer.leave()
            exchange = Exchange(viewer.scope, viewer.receive, viewer.send)
            with pytest.raises(ApiError) as caught:
                await asyncio.wait_for(watchers.watch(exchange), 20)
    assert caught.value.status == 504


async def test_a_story_has_events_and_spans(fake: Any) -> None:
    """In milliseconds since the first; the caller's key decides who may read it."""
    told = fake.stories["cmpl-1.0"] = admin_pb2.ExplainResponse(request_id="cmpl-1.0")
    kinds = admin_pb2.RequestEvent.Kind
    told.events.add(kind=kinds.KIND_QUEUED, time_unix_ns=5_000_000_000)
    told.events.add(kind=kinds.KIND_ADMITTED, time_unix_ns=5_250_000_000, executor="e:1")
    told.events.add(kind=kinds.KIND_FINISHED, time_unix_ns=6_000_000_000, detail="stop")
    async with console(fake) as gateway, http_of(gateway) as http:
        answer = await http.get("/console/story", params={"request_id": "cmpl-1.0"})
    story = answer.json()
    assert answer.status_code == 200
    assert [event["at_ms"] for event in story["events"]] == [0, 250, 1000]
    assert story["events"][1]["kind"] == "admitted"
    assert story["spans"] == [
        {"phase": "queued", "begin_ms": 0, "end_ms": 250},
        {"phase": "prefill", "begin_ms": 250, "end_ms": 1000},
    ]
    assert story["has_ended"] is True


async def test_a_story_that_nobody_knows_is_404(fake: Any) -> None:
    """And one without an id is 400, each naming the parameter."""
    async with console(fake) as gateway, http_of(gateway) as http:
        unknown = await http.get("/console/story", params={"request_id": "nobody"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")
        for given in ({}, {"request_id": ""}, {"request_id": "x" * 1025}):
            missing = await http.get("/console/story", params=given)
            assert missing.status_code == 400
            assert missing.json()["error"]["param"] == "request_id"
