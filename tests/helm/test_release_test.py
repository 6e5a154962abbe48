"""Tests of what `helm test` runs: it succeeds where all is well, and not elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.chart import CHART

PROGRAM = (CHART / "files" / "test.py").read_text(encoding="utf-8")
ANSWER = {"usage": {"completion_tokens": 1}}


class Gateway(ThreadingHTTPServer):
    """Answers as it is told, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.body = 200, ANSWER
        self.asked: list[tuple[str, str | None, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self._answer(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, self.headers.get("authorization"), body))
        self._answer(self.server.status, self.server.body)

    def _answer(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(gateway: Gateway, **variables: str) -> subprocess.CompletedProcess[str]:
    given = {
        "URL": f"http://127.0.0.1:{gateway.server_port}",
        "MODEL": "a-model",
        "NEEDS_KEY": "no",
        "VERIFY": "yes",
        **variables,
    }
    plain = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    return subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        env={**plain, "no_proxy": "*", **given},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_it_asks_for_one_token(gateway: Gateway) -> None:
    """Of the model that is served, with the key that it has."""
    done = run(gateway, OCTAVO_API_KEY="octavo-key")
    assert done.returncode == 0, done.stderr
    ((path, authorization, body),) = gateway.asked
    assert path == "/v1/completions"
    assert authorization == "Bearer octavo-key"
    assert (body["model"], body["max_tokens"]) == ("a-model", 1)


@pytest.mark.parametrize(
    ("status", "body"), [(500, {}), (401, {}), (200, {"usage": {"completion_tokens": 0}})]
)
def test_it_fails_without_a_token(gateway: Gateway, status: int, body: Any) -> None:
    """Whatever comes instead."""
    gateway.status, gateway.body = status, body
    assert run(gateway).returncode != 0


def test_where_keys_are_needed_it_wants_to_be_refused(gateway: Gateway) -> None:
    """Without a key of its own: an answer would show that keys are not asked for."""
    gateway.status = 401
    assert run(gateway, NEEDS_KEY="yes").returncode == 0
    gateway.status = 200
    assert run(gateway, NEEDS_KEY="yes").returncode != 0
