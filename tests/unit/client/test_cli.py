from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from octavo_client.cli import main
from octavo_client.cli._lazy import LazyGroup, ServiceCommands
from octavo_client.cli.generate import generate

OCTAVO = [sys.executable, "-P", "-m", "octavo_client"]


def octavo(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OCTAVO, *arguments], capture_output=True, text=True, timeout=30, check=False, **kwargs
    )


def one_error_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("octavo: ")
    return lines[0]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_lists_every_command_and_imports_none() -> None:
    """--help names own and services' commands without loading gRPC, rich or a service."""
    code = (
        "import sys; from octavo_client.cli import main; code = main(['--help']);"
        "heavy = {'grpc', 'rich', 'httpx', 'torch', 'scheduler_svc', 'executor_svc'};"
        "print('LOADED', sorted(heavy & set(sys.modules))); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    own = ("serve", "demo", "generate", "chat", "bench")
    for name in (*own, "scheduler", "executor", "gateway", "model"):
        assert f"\n  {name} " in done.stdout
    assert "LOADED []" in done.stdout


def test_wrong_port_is_one_line() -> None:
    """With nothing at the target: one line that names it and says what to start."""
    done = octavo("generate", "hi", "--target", "127.0.0.1:1")
    assert done.returncode == 1
    line = one_error_line(done.stderr)
    assert "127.0.0.1:1" in line
    assert "octavo serve" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "hi", "--frobnicate"], "--frobnicate"),
        (["generate"], "PROMPT"),
        (["nonsense"], "nonsense"),
        (["generate", "hi", "--target", "no-port"], "HOST:PORT"),
        (["bench", "--rate", "-1"], "--rate"),
        (["generate", "hi", "--n", "0"], "--n"),
        (["bench", "--requests", "a", "--trace", "b"], "not both"),
        (["bench", "--json", "no/such/folder/a.json"], "cannot write to no/such/folder/a.json"),
        (["bench", "--plot", "no/such/folder/a.png"], "cannot write to no/such/folder/a.png"),
    ],
)
def test_wrong_command_lines_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """What is wrong with a command line is named in one line, with an exit code."""
    code, out, err = run(capsys, *arguments)
    assert code in (1, 2)
    assert out == ""
    assert said in one_error_line(err)


def test_debug_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OCTAVO_DEBUG=1 adds the traceback to the line."""
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    _, _, err = run(capsys, "generate", "hi", "--target", "no-port")
    assert "Traceback (most recent call last)" in err
    assert "HOST:PORT" in err.strip().splitlines()[-1]


def test_generate_streams_text(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The text alone goes to stdout; a model with a chat template gets a chat message."""
    code, out, err = run(
        capsys, "generate", "hi", "--target", fake.target, "--max-tokens", "3", "--stop", "END"
    )
    assert (code, out, err) == (0, "1 2 3 \n", "")
    request = fake.requests[0]
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("user", "hi")]
    assert list(request.stopping.stop) == ["END"]
    assert not request.sampling.HasField("temperature")


def test_generate_raw_continues_text(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """--raw sends plain text, and flags of value 0 are sent too."""
    code, *_ = run(
        capsys, "generate", "hi", "--target", fake.target, "--raw", "--temperature", "0",
        "--max-tokens", "1", "--top-k", "0",
    )  # fmt: skip
    assert code == 0
    assert fake.requests[0].text == "hi"
    assert fake.requests[0].sampling.HasField("temperature")
    assert fake.requests[0].sampling.temperature == 0
    assert fake.requests[0].sampling.HasField("top_k")


def test_generate_without_template_is_raw(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without a chat template gets plain text by default."""
    fake.has_chat_template = False
    code, *_ = run(capsys, "generate", "hi", "--target", fake.target, "--max-tokens", "1")
    assert code == 0
    assert fake.requests[0].text == "hi"


def test_generate_json(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the whole completion, every choice."""
    code, out, _ = run(
        capsys, "generate", "hi", "--target", fake.target, "--max-tokens", "2", "--n", "2", "--json"
    )
    assert code == 0
    completion = json.loads(out)
    assert [choice["token_ids"] for choice in completion["choices"]] == [[1, 2], [101, 102]]
    assert completion["choices"][0]["finish_reason"] == "length"


def test_generate_shows_what_the_service_refuses(
    fake: Any, wire: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The service's own message, with field and bound, is the line."""
    message = "sampling.top_p must be above 0, to 1, got 7"
    fake.failures = [wire.Failure(grpc.StatusCode.INVALID_ARGUMENT, message, started=False)]
    code, _, err = run(capsys, "generate", "hi", "--target", fake.target, "--top-p", "7")
    assert code == 1
    assert message in one_error_line(err)


def test_generate_has_a_bound_of_tokens_by_default(
    fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --max-tokens at most 256 are asked for; 0 asks for the context's rest."""
    run(capsys, "generate", "hi", "--target", fake.target)
    run(capsys, "generate", "hi", "--target", fake.target, "--max-tokens", "0")
    assert fake.requests[0].stopping.max_tokens == 256
    assert not fake.requests[1].stopping.HasField("max_tokens")


def test_generate_takes_what_the_context_has_left(
    fake: Any, wire: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """If fewer than --max-tokens are left, the answer goes to the end of the context."""
    refusal = wire.Failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        details=(wire.violation("stopping.max_tokens", "at most 9"),),
        started=False,
    )
    fake.failures = [refusal]
    code, _, err = run(capsys, "generate", "hi", "--target", fake.target)
    assert (code, err) == (0, "")
    assert not fake.requests[1].stopping.HasField("max_tokens")


def test_generate_prints_each_choice_as_it_ends(
    fake: Any, wire: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several choices the first to end is printed first, each under its number."""
    fake.override = lambda _: [
        wire.delta(0, 0), wire.delta(1, 0), wire.finished(1, 1), wire.delta(0, 1),
        wire.finished(0, 2),
    ]  # fmt: skip
    code, out, _ = run(capsys, "generate", "hi", "--target", fake.target, "--n", "2")
    assert (code, out) == (0, "[1] 101 \n[0] 1 2 \n")


@pytest.mark.parametrize(("num_choices", "begin"), [("1", "1 2 "), ("2", "[0] 1 2 ")])
def test_generate_keeps_what_came_before_the_deadline(
    fake: Any, capsys: pytest.CaptureFixture[str], num_choices: str, begin: str
) -> None:
    """A passed deadline leaves the text so far, ended by a newline, and says which flags help."""
    fake.delta_seconds = 0.02
    code, out, err = run(
        capsys, "generate", "hi", "--target", fake.target, "--raw", "--timeout", "0.5",
        "--n", num_choices, "--max-tokens", "1000",
    )  # fmt: skip
    assert code == 1
    assert out.startswith(begin)
    assert out.endswith("\n")
    assert one_error_line(err) == (
        "octavo: the deadline of 0.5 s passed: raise --timeout or lower --max-tokens"
    )


def test_generate_keeps_what_came_before_a_failure(
    fake: Any, wire: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error after some text comes on a line of its own."""
    fake.failures = [wire.Failure(grpc.StatusCode.INTERNAL, "broken", after_deltas=2)]
    code, out, err = run(capsys, "generate", "hi", "--target", fake.target)
    assert (code, out, err) == (1, "1 2 \n", "octavo: broken\n")


def test_generate_says_that_it_resumes(
    fake: Any, wire: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed stream is told on stderr once per outage; stdout has the text alone."""
    cut = wire.Failure(grpc.StatusCode.UNAVAILABLE, after_deltas=2)
    again = wire.Failure(grpc.StatusCode.UNAVAILABLE, started=False)
    fake.failures = [cut, again]
    code, out, err = run(capsys, "generate", "hi", "--target", fake.target, "--max-tokens", "4")
    assert (code, out, err) == (0, "1 2 3 4 \n", "connection lost, resuming…\n")


def test_generate_reads_stdin(fake: Any) -> None:
    """The prompt - is standard input."""
    done = octavo("generate", "-", "--target", fake.target, "--max-tokens", "1", input="grüß")
    assert (done.returncode, done.stdout) == (0, "1 \n")
    assert fake.requests[0].chat.messages[0].content == "grüß"


def test_generate_refuses_invalid_utf8() -> None:
    """Bytes that are not UTF-8 are named with their offset, before any call."""
    result = CliRunner().invoke(generate, ["-"], input=b"ab\xffcd", standalone_mode=True)
    assert result.exit_code == 1
    assert "byte 0xff at offset 2" in result.output


def test_broken_pipe_is_quiet(fake: Any) -> None:
    """A reader that has enough (head) ends the command without a word."""
    fake.delta_seconds = 0.005
    command = [*OCTAVO, "generate", "hi", "--target", fake.target, "--max-tokens", "300"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(2) == b"1 "
    process.stdout.close()
    assert process.wait(20) != 0
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_ctrl_c_cancels_and_exits_130(fake: Any) -> None:
    """Ctrl-C frees the request at the service, prints no traceback, exits 130."""
    fake.delta_seconds = 0.05
    process = subprocess.Popen(
        [*OCTAVO, "generate", "hi", "--target", fake.target, "--max-tokens", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.read(2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert fake.cancelled.wait(5)


def test_bench_lists_the_services_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    """Each benchmark of a service has a line that says what it measures."""
    _, out, _ = run(capsys, "bench", "--help")
    assert "Cost of a scheduler step" in out
    assert "Use of the KV pool" in out


def test_serve_names_a_busy_port() -> None:
    """A port in use is one line that names the flag; nothing is started."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        begin = time.monotonic()
        done = octavo("serve", "--listen", f"127.0.0.1:{port}")
    assert time.monotonic() - begin < 5
    assert done.returncode == 1
    assert f"port {port} is in use" in done.stderr.strip().splitlines()[-1]
    assert "--listen" in done.stderr
    assert "Traceback" not in done.stderr


def _group(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> LazyGroup:
    monkeypatch.setattr("octavo_client.cli._lazy.entry_points", lambda group: list(points))
    services = ServiceCommands("octavo.commands", {"thing": ("scheduler", "Do a thing.")})
    return LazyGroup("octavo", own={}, services=services)


def test_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service whose packages are missing: one line with the pip command."""
    absent = EntryPoint("thing", "no_such_package_here:main", "octavo.commands")
    for group in (_group(monkeypatch), _group(monkeypatch, absent)):
        result = CliRunner().invoke(group, ["thing", "--help"])
        assert result.exit_code == 1
        assert "pip install 'octavo[scheduler]'" in result.output


def test_services_get_their_arguments_untouched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All arguments, --help and -- too, reach the service's main; its code is the exit code."""
    (tmp_path / "thing_svc.py").write_text(
        "import sys\ndef main(argv):\n    print(argv, sys.argv[1:])\n    return 7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    group = _group(monkeypatch, EntryPoint("thing", "thing_svc:main", "octavo.commands"))
    arguments = ["--help", "--", "-x", "a b", "--", ""]
    result = CliRunner().invoke(group, ["thing", *arguments], standalone_mode=False)
    assert result.output == f"{arguments} {arguments}\n"
    assert result.return_value == 7


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`octavo` alone is not an error."""
    code, out, _ = run(capsys)
    assert code == 0
    assert "Usage: octavo" in out


def test_target_comes_from_the_environment(fake: Any) -> None:
    """OCTAVO_TARGET is the default of --target."""
    environment = {**os.environ, "OCTAVO_TARGET": fake.target}
    done = octavo("generate", "hi", "--max-tokens", "1", env=environment)
    assert (done.returncode, done.stdout) == (0, "1 \n")
