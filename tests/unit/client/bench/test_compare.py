from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from octavo_client.bench.compare import Comparison, Load, Turn, compare, schedule, warm_up_for
from octavo_client.bench.compare_process import PeerError, PeerProcess
from octavo_client.bench.compare_table import Spread, spreads
from octavo_client.bench.measure import Record, Slo, summarize
from octavo_client.bench.workload import Request
from octavo_client.cli import main
from octavo_client.errors import OctavoError

# A server of OpenAI's completions: argv is the port, then switches.
FAKE_SERVER = """
import http.server, json, signal, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        ready = "never-ready" not in sys.argv
        self.reply(200 if ready else 503, json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        length = body["max_tokens"] - ("short" in sys.argv)
        chunks = [{"choices": [{"index": 0, "text": "t"}]} for _ in range(length)]
        chunks.append({"choices": [], "usage": {"completion_tokens": length}})
        self.reply(200, "".join(f"data: {json.dumps(chunk)}\\n\\n" for chunk in chunks))

    def reply(self, status, text):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

if "dies" in sys.argv:
    sys.exit("no such model")
print("serving", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

# A script peer: every token of every request after a second each.
FAKE_SCRIPT = """
import json, sys
requests = json.load(open(sys.argv[1]))
print("a line for the log", file=sys.stderr)
entries = [
    {"sent_at": 0.0, "ttft": 1.0, "gaps": [1.0] * (r["out"] - 1), "e2e": float(r["out"]),
     "num_output_tokens": r["out"], "error": None}
    for r in requests
]
process = {"ready_seconds": 4.0, "peak_rss_bytes": 2**30}
print(json.dumps({"requests": entries, "process": process, "server": {"model": "s"}}))
"""


def turn(tokens_per_second: int, **fields: Any) -> Turn:
    """A turn of one request: so many tokens in one second."""
    request = Request("0", (1,), tokens_per_second)
    record = Record(request, sent_at=0.0, ended_at=1.0)
    record.num_output_tokens = tokens_per_second
    return Turn(summary=summarize([record], Slo(1, 1)), **fields)


class ScriptedPeer:
    """Takes its turns from a list, and notes when in a shared diary."""

    def __init__(self, name: str, turns: list[Turn | OctavoError], diary: list[str]) -> None:
        self.name = name
        self._turns = turns
        self._diary = diary

    async def take_turn(self, load: Load, say: Callable[[str], None]) -> Turn:
        self._diary.append(self.name)
        found = self._turns.pop(0)
        if isinstance(found, OctavoError):
            raise found
        return found


async def nothing_sent(*_: Any) -> Any:
    raise AssertionError


LOAD = Load([Request("0", (1,), 1)], [], Slo(1, 1), 1.0, nothing_sent, lambda *_: None)


def test_rounds_alternate() -> None:
    """Every peer has its turn before any has its next."""
    assert list(schedule(["a", "b"], 2)) == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


async def test_a_peer_that_fails_gets_no_more_turns() -> None:
    """The others go on, and what failed is kept with its reason."""
    diary: list[str] = []
    peers = [
        ScriptedPeer("a", [turn(10) for _ in range(3)], diary),
        ScriptedPeer("b", [turn(5), PeerError("broke\n down")], diary),
    ]
    done = await compare(peers, LOAD, num_rounds=3)
    assert diary == ["a", "b", "a", "b", "a"]
    assert done.has_failed
    assert [each.error for each in done.turns["b"]] == [None, "broke down"]


def test_medians_and_ratios() -> None:
    """A ratio divides medians; the first peer has none, nor has a count of failures."""
    table = spreads(
        Comparison(
            ("a", "b"),
            {
                "a": [turn(10), turn(40), turn(20)],
                "b": [turn(50), turn(70), Turn(error="x"), turn(10)],
            },
        )
    )
    assert table["a"]["output_tokens_per_second"] == Spread(20, 10, 40)
    assert table["b"]["output_tokens_per_second"] == Spread(50, 10, 70, ratio=2.5)
    assert table["b"]["failed"] == Spread(0, 0, 0)
    assert table["b"]["ready_seconds"] is None


def test_a_first_peer_without_figures_gives_no_ratios() -> None:
    """If the first peer failed, the others' medians stand alone."""
    table = spreads(Comparison(("a", "b"), {"a": [Turn(error="x")], "b": [turn(7)]}))
    assert table["a"]["output_tokens_per_second"] is None
    assert table["b"]["output_tokens_per_second"] == Spread(7, 7, 7)


def test_the_warm_up_shares_no_prefix_with_the_workload() -> None:
    """Its prompt is the first one's, backwards, and its output is short."""
    (warm,) = warm_up_for([Request("0", (5, 6, 7), 100)])
    assert (warm.prompt, warm.num_output_tokens) == ((7, 6, 5), 8)


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


async def is_never_ready() -> bool:
    return False


async def test_readiness_has_a_deadline(tmp_path: Path) -> None:
    """A peer that is not ready in time is an error that says what its log says."""
    process = PeerProcess("p", tmp_path / "p.log")
    body = "import time; print('loading', flush=True); time.sleep(60)"
    await process.start([sys.executable, "-c", body])
    try:
        with pytest.raises(PeerError, match=r"not ready after 1 s \(log: .*it says: loading"):
            await process.until_ready(is_never_ready, 1)
    finally:
        await process.stop()
    assert not is_alive(process.pid)


async def test_a_death_ends_the_wait_for_readiness(tmp_path: Path) -> None:
    """A peer that ends is an error at once, with exit code and last line."""
    process = PeerProcess("p", tmp_path / "p.log")
    await process.start([sys.executable, "-c", "raise SystemExit('no such model')"])
    with pytest.raises(PeerError, match=r"before it was ready: exit code 1 .*no such model"):
        await process.until_ready(is_never_ready, 30)
    await process.stop()


async def test_a_command_that_is_not_there_says_so(tmp_path: Path) -> None:
    """A wrong binary is told by name."""
    process = PeerProcess("p", tmp_path / "p.log")
    await process.start(["/no/such/server"])
    with pytest.raises(PeerError, match="cannot run /no/such/server: No such file"):
        await process.until_ended(30)
    await process.stop()


async def test_stop_ends_the_whole_tree(tmp_path: Path) -> None:
    """Descendants end too, though one left the session and all ignore SIGTERM."""
    pids = tmp_path / "pids"
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    child = f"{stubborn} time.sleep(60)"
    parent = (
        f"{stubborn} import os, subprocess, sys; "
        f"a = subprocess.Popen([sys.executable, '-c', {child!r}]); "
        f"b = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); "
        f"open({str(pids)!r} + '.new', 'w').write(f'{{a.pid}} {{b.pid}}'); "
        f"os.rename({str(pids)!r} + '.new', {str(pids)!r}); time.sleep(60)"
    )

    async def has_children() -> bool:
        return pids.exists()

    process = PeerProcess("p", tmp_path / "p.log")
    await process.start([sys.executable, "-c", parent])
    await process.until_ready(has_children, 30)
    family = [process.pid, *map(int, pids.read_text().split())]
    assert all(map(is_alive, family))
    assert process.peak_rss_bytes() > 3 * 2**20  # three interpreters, at the very least
    await process.stop(0.2)
    deadline = time.monotonic() + 10
    while any(map(is_alive, family)) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert not any(map(is_alive, family))


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "w.json"
    path.write_text(json.dumps([{"prompt": [1000, 1001], "out": n + 1} for n in range(3)]))
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """Writes the recipe NAME.toml of a fake server with these switches."""
    server = tmp_path / "server.py"
    server.write_text(FAKE_SERVER)

    def write(name: str, *switches: str, ready_seconds: float = 60) -> Path:
        path = tmp_path / f"{name}.toml"
        command = ["{python}", str(server), "{port}", "{mood}", *switches]
        path.write_text(
            f"command = {json.dumps(command)}\n"
            f"url = 'http://127.0.0.1:{{port}}/v1'\nready_seconds = {ready_seconds}\n"
            "[values]\nmood = 'good'\n"
        )
        return path

    return write


def run_compare(*arguments: Any) -> int:
    return main(["bench", "compare", *map(str, arguments)])


def children() -> set[int]:
    path = Path(f"/proc/{os.getpid()}/task")
    found = (task / "children" for task in path.iterdir())
    return {int(pid) for file in found if file.exists() for pid in file.read_text().split()}


def test_compare_runs_everyone_and_stops_them(
    recipe: Callable[..., Path],
    workload: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Servers and a script in two rounds: a table, JSON with every turn, a plot, nobody left."""
    before = children()
    script, script_recipe = tmp_path / "script.py", tmp_path / "script.toml"
    script.write_text(FAKE_SCRIPT)
    script_recipe.write_text(
        f"kind = 'script'\ncommand = ['{{python}}', '{script}', '{{requests}}']\n"
    )
    out, picture = tmp_path / "out.json", tmp_path / "p.png"
    code = run_compare(
        "--peer", recipe("a"), "--peer", f"B={recipe('b')}", "--peer", script_recipe,
        "--set", "B.mood=better", "--rounds", 2, "--requests", workload,
        "--log-dir", tmp_path / "logs", "--json", out, "--plot", picture,
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    started = [line for line in printed.err.splitlines() if line.startswith("round")]
    assert [line.split(": ")[1] for line in started] == ["a", "B", "script"] * 2
    assert "| output tokens/s" in printed.out
    peers = {peer["name"]: peer for peer in json.loads(out.read_text())["peers"]}
    assert [len(peer["turns"]) for peer in peers.values()] == [2, 2, 2]
    assert peers["a"]["turns"][0]["summary"]["num_output_tokens"] == 6
    assert peers["a"]["spread"]["peak_rss_bytes"]["min"] > 2**20
    assert peers["a"]["spread"]["output_tokens_per_second"]["ratio"] is None
    assert peers["B"]["spread"]["output_tokens_per_second"]["ratio"] > 0
    summary = peers["script"]["turns"][0]["summary"]
    assert (summary["duration"], summary["ttft"]["p50"], summary["itl"]["p50"]) == (3.0, 1.0, 1.0)
    assert peers["script"]["spread"]["ready_seconds"]["median"] == 4.0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "better" in (tmp_path / "logs" / "B.log").read_text()
    assert children() <= before


def test_a_running_server_takes_part(
    fake: Any, workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NAME=URL is measured where it runs, after a warm-up of its own each round."""
    code = run_compare("--target", f"x=grpc://{fake.target}", "--requests", workload, "--rounds", 2)
    assert code == 0, capsys.readouterr().err
    prompts = [list(request.tokens.ids) for request in fake.requests]
    assert prompts.count([1001, 1000]) == 2
    assert prompts.count([1000, 1001]) == 6


def test_a_failed_peer_is_told_and_the_others_go_on(
    recipe: Callable[..., Path], workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 names it; the others have figures."""
    code = run_compare(
        "--peer", recipe("dead", "dies"), "--peer", recipe("deaf", "never-ready", ready_seconds=2),
        "--peer", recipe("good"), "--rounds", 2, "--requests", workload,
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 1
    assert "ended before it was ready: exit code 1" in printed.err
    assert "no such model" in printed.err
    assert "not ready after 2 s" in printed.err
    assert printed.err.splitlines()[-1] == "octavo: failed: dead, deaf"
    assert printed.err.count(": good") == 2
    row = next(line for line in printed.out.splitlines() if "output tokens/s" in line)
    assert [cell.strip() for cell in row.split("|")[2:4]] == ["-", "-"]
    assert row.split("|")[4].strip()[0].isdigit()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_what_was_started(
    recipe: Callable[..., Path], workload: Path, tmp_path: Path, number: int, code: int
) -> None:
    """Ctrl-C or SIGTERM amid a turn: the peer ends, then the command, without a traceback.

    The turns that had ended are reported.
    """
    logs, out = tmp_path / "logs", tmp_path / "out.json"
    command = [sys.executable, "-P", "-m", "octavo_client", "bench", "compare"]
    command += ["--peer", str(recipe("good")), "--peer", str(recipe("deaf", "never-ready"))]
    command += ["--requests", str(workload), "--log-dir", str(logs), "--json", str(out)]
    pipe = subprocess.PIPE
    running = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    log = logs / "deaf.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "serving" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int(Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()[0])
    running.send_signal(number)
    printed, err = running.communicate(timeout=60)
    assert running.returncode == code
    assert "Traceback" not in err
    assert not is_alive(pid)
    assert "interrupted" in err
    assert "| output tokens/s" in printed
    assert [len(peer["turns"]) for peer in json.loads(out.read_text())["peers"]] == [1, 0]


def test_wrong_lengths_make_it_fail(
    recipe: Callable[..., Path], workload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that stops too early is found out."""
    code = run_compare("--peer", recipe("s", "short"), "--rounds", 1, "--requests", workload)
    assert code == 1
    assert "3 requests failed or came back with the wrong length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peer", "http://127.0.0.1:1"], "NAME="),
        (["--peer", "x=ftp://a"], "--peer must be"),
        (["--peer", "a=grpc://h:1", "--peer", "a=grpc://h:2"], "two are named 'a'"),
        (["--peer", "a=grpc://h:1", "--set", "dtype"], "--set must be"),
        (["--peer", "a=grpc://h:1", "--set", "dtype=x"], "no recipe has a value 'dtype'"),
        (["--peer", "a=grpc://h:1", "--rate", "1", "--at-once"], "not both"),
        (["--peer", "no/such.toml"], "no/such.toml: No such file"),
        (["--peer", "a=grpc://h:1", "--json", "no/such/a.json"], "cannot write to no/such/a.json"),
    ],
)
def test_wrong_arguments_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """What is wrong with a command line is named in one line."""
    assert run_compare(*arguments) in (1, 2)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_a_script_that_prints_nonsense_is_told(
    workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a script prints must have what the arithmetic needs, and the message says what."""
    script, path = tmp_path / "script.py", tmp_path / "script.toml"
    path.write_text(f"kind = 'script'\ncommand = ['{{python}}', '{script}', '{{requests}}']\n")
    for broken, said in (
        ("print('done')", "printed no JSON with 'requests'"),
        ("print('{\"requests\": []}')", "must be a list of 3"),
        (
            textwrap.dedent(FAKE_SCRIPT).replace('"ttft": 1.0', '"ttft": None'),
            "request 0: field 'ttft' must be seconds from 0",
        ),
    ):
        script.write_text(broken)
        assert run_compare("--peer", path, "--rounds", 1, "--requests", workload) == 1
        assert said in capsys.readouterr().err
