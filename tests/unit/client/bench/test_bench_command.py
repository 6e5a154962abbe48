from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from octavo_client.cli import main


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """Six requests; the second half arrives 0.2 s later."""
    path = tmp_path / "w.json"
    requests = [{"prompt": [1000 + n], "out": n + 1, "arrival": 0.2 * (n >= 3)} for n in range(6)]
    path.write_text(json.dumps(requests))
    return path


def bench(*arguments: Any) -> int:
    return main(["bench", *map(str, arguments)])


def test_bench_against_grpc(fake: Any, workload: Path, tmp_path: Path) -> None:
    """Every request gets its forced length, greedy; the JSON holds each of them."""
    out = tmp_path / "out.json"
    assert bench("--target", f"grpc://{fake.target}", "--requests", workload, "--json", out) == 0
    report = json.loads(out.read_text())
    assert [request["num_output_tokens"] for request in report["requests"]] == [1, 2, 3, 4, 5, 6]
    assert report["summary"]["num_output_tokens"] == 21
    assert report["server"]["model"] == "fake"
    late = [request["sent_at"] for request in report["requests"][3:]]
    assert all(0.2 <= sent < 1.0 for sent in late)
    assert all(request.stopping.ignore_eos for request in fake.requests)
    assert all(request.sampling.temperature == 0.0 for request in fake.requests)


def test_bench_counts_refusals(
    fake: Any, wire: Any, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refusals are not retried; they are counted, shown by kind, and make it exit 1."""
    refusal = wire.Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full", started=False)
    fake.failures = [refusal, refusal]
    assert bench("--target", fake.target, "--requests", workload) == 1
    err = capsys.readouterr().err
    assert "2x Overloaded: queue is full" in err
    assert len(fake.requests) == 6
    fake.failures = [refusal]
    assert bench("--target", fake.target, "--requests", workload, "--allow-failures") == 0


def test_bench_checks_every_length(
    fake: Any, wire: Any, workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that stops too early is found out, whatever --allow-failures says."""
    fake.override = lambda request: [wire.delta(0, 0), wire.finished(0, 1)]
    assert bench("--target", fake.target, "--requests", workload, "--allow-failures") == 1
    assert "5 came back with the wrong length" in capsys.readouterr().err


def test_bench_bounds_concurrency(fake: Any, workload: Path, tmp_path: Path) -> None:
    """With --concurrency 1 no request is sent before the one before it ended."""
    fake.delta_seconds = 0.01
    out = tmp_path / "out.json"
    assert (
        bench("--target", fake.target, "--requests", workload, "--concurrency", 1, "--json", out)
        == 0
    )
    spans = [
        (request["sent_at"], request["sent_at"] + request["e2e"])
        for request in json.loads(out.read_text())["requests"]
    ]
    assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(spans))


def test_bench_sends_at_once(fake: Any, workload: Path, tmp_path: Path) -> None:
    """--at-once ignores the workload's arrivals."""
    out = tmp_path / "out.json"
    code = bench("--target", fake.target, "--requests", workload, "--at-once", "--json", out)
    assert code == 0
    assert all(request["sent_at"] < 0.15 for request in json.loads(out.read_text())["requests"])


def test_bench_draws_a_plot(fake: Any, workload: Path, tmp_path: Path) -> None:
    """--plot writes a picture."""
    picture = tmp_path / "p.png"
    assert bench("--target", fake.target, "--requests", workload, "--plot", picture) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_refuses_tokens_that_the_model_lacks(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A workload of another vocabulary is refused before anything is sent."""
    path = tmp_path / "w.json"
    path.write_text(json.dumps([{"prompt": [99999], "out": 1}]))
    assert bench("--target", fake.target, "--requests", path) == 1
    assert "99999" in capsys.readouterr().err
    assert not fake.requests


def test_bench_dispatches_to_other_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`octavo bench NAME` runs what a package registered, with its arguments and exit code."""
    (tmp_path / "core_bench.py").write_text("def main(argv):\n    print(argv)\n    return 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [EntryPoint("corelike", "core_bench:main", "octavo.bench_commands")]
    monkeypatch.setattr(
        "octavo_client.cli._lazy.entry_points",
        lambda group: points if group == "octavo.bench_commands" else [],
    )
    assert bench("corelike", "--help", "7") == 3
    assert capsys.readouterr().out == "['--help', '7']\n"


class _Completions(http.server.BaseHTTPRequestHandler):
    """The part of OpenAI's API that the load generator uses."""

    protocol_version = "HTTP/1.1"
    bodies: list[dict[str, Any]]

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(json.dumps({"data": [{"id": "served-model"}]}).encode(), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        length = body["max_tokens"]
        chunks = [{"choices": [{"index": 0, "text": f"t{n}"}]} for n in range(length)]
        chunks.append({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        chunks.append({"choices": [], "usage": {"completion_tokens": length}})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        self._reply("".join(lines).encode(), "text/event-stream")

    def _reply(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def openai() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server of OpenAI's completions, and the bodies that it got."""
    handler = type("Handler", (_Completions,), {"bodies": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler.bodies
        server.shutdown()


def test_bench_against_openai_http(
    openai: tuple[str, list[dict[str, Any]]], workload: Path, tmp_path: Path
) -> None:
    """The same workload goes to OpenAI's API: prompts as token ids, lengths forced."""
    url, bodies = openai
    out = tmp_path / "out.json"
    assert bench("--target", f"{url}/v1", "--requests", workload, "--json", out) == 0
    requests = json.loads(out.read_text())["requests"]
    assert [request["num_output_tokens"] for request in requests] == [1, 2, 3, 4, 5, 6]
    assert [len(request["gaps"]) for request in requests] == [0, 1, 2, 3, 4, 5]
    body = next(body for body in bodies if body["max_tokens"] == 2)
    assert body["prompt"] == [1001]
    assert body["ignore_eos"] is True
    assert body["min_tokens"] == 2
    assert body["model"] == "served-model"


def test_bench_without_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing at the target: one line, for both kinds of target."""
    for target in ("grpc://127.0.0.1:1", "http://127.0.0.1:1"):
        assert bench("--target", target, "--max-requests", 1) == 1
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert "127.0.0.1:1" in lines[0]
