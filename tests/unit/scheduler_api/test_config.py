"""Tests of scheduler_svc.config and scheduler_svc.logs."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pydantic
import pytest
from octavo.addresses import is_loopback
from octavo.settings import parse_address

from scheduler_svc.config import ENV_PREFIX, SchedulerConfig
from scheduler_svc.errors import StartupError
from scheduler_svc.logs import bound_ids, configure_logging, get_logger


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SchedulerConfig.model_fields:
        monkeypatch.delenv(ENV_PREFIX + name.upper(), raising=False)
    monkeypatch.delenv("OCTAVO_MODEL_STORE", raising=False)


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag, then its variable, then the default."""
    monkeypatch.setenv("OCTAVO_SCHEDULER_MAX_QUEUE", "7")
    monkeypatch.setenv("OCTAVO_SCHEDULER_EXECUTORS", "a:1, b:2")
    config = SchedulerConfig.from_args(["--max-queue", "8"])
    assert (config.max_queue, config.executors) == (8, ("a:1", "b:2"))
    assert SchedulerConfig.from_args([]).max_queue == 7


def test_the_model_store_has_a_variable_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """OCTAVO_MODEL_STORE is shared with the other commands; the scheduler's own wins."""
    monkeypatch.setenv("OCTAVO_MODEL_STORE", "~/models")
    assert SchedulerConfig.from_args([]).model_store == Path.home() / "models"
    monkeypatch.setenv("OCTAVO_SCHEDULER_MODEL_STORE", "/srv/models")
    assert SchedulerConfig.from_args([]).model_store == Path("/srv/models")


def test_switches_need_no_value() -> None:
    """--no-prefix-cache turns off what is on."""
    assert SchedulerConfig.from_args([]).prefix_cache
    assert not SchedulerConfig.from_args(["--no-prefix-cache"]).prefix_cache


def test_executors_come_in_one_flag_or_several() -> None:
    """Commas and repetition mean the same."""
    once = SchedulerConfig.from_args(["--executors", "a:1,[::1]:2"])
    twice = SchedulerConfig.from_args(["--executors", "a:1", "--executors", "[::1]:2"])
    assert once.executors == twice.executors == ("a:1", "[::1]:2")


BAD_FLAGS = [
    (["--max-steps-in-flight", "5"], "--max-steps-in-flight", "at most 4"),
    (["--max-steps-in-flight", "0"], "--max-steps-in-flight", "at least 1"),
    (["--watermark", "1"], "--watermark", "below 1"),
    (["--watermark", "nan"], "--watermark", "at least 0"),
    (["--max-queue", "many"], "--max-queue", "a whole number"),
    (["--policy", "lifo"], "--policy", "one of fcfs, priority, fair"),
    (["--listen", "50051"], "--listen", "HOST:PORT"),
    (["--listen", "::1:50051"], "--listen", "HOST:PORT"),
    (["--metrics-listen", "9464"], "--metrics-listen", "HOST:PORT"),
    (["--listen", "localhost:65536"], "--listen", "up to 65535"),
    (["--listen", "0.0.0.0:1"], "--listen", "--insecure-bind"),
    (["--listen", "0.0.0.0:1", "--api-keys", "k"], "--listen", "--insecure-bind"),
    (["--tls-cert", "c"], "--tls-cert", "--tls-key"),
    (["--tls-key", "k"], "--tls-key", "--tls-cert"),
    (["--tls-client-ca", "c"], "--tls-client-ca", "--tls-cert"),
    (["--executor-cert", "c"], "--executor-cert", "--executor-ca"),
    (["--executor-server-name", "n"], "--executor-server-name", "--executor-ca"),
    (["--executor-ca", "a", "--executor-key", "k"], "--executor-key", "--executor-cert"),
    (["--api-keys", "k", "--api-keys-inline", "i"], "--api-keys-inline", "not both"),
    (["--max-connection-calls", "0"], "--max-connection-calls", "at least 1"),
    (["--executors", ""], "--executors", "at least one"),
    (["--executors", "a:0"], "--executors", "from 1 to 65535"),
    (["--executors", "a:1,a:1"], "--executors", "without repetitions"),
    (["--scheduler-id", "x" * 129], "--scheduler-id", "at most 128"),
    (["--model", ""], "--model", "not empty"),
    (["--no-such-flag"], "--no-such-flag", "--help"),
    (["--max-queue"], "--max-queue", "expected one argument"),
]


@pytest.mark.parametrize(("args", "flag", "bound"), BAD_FLAGS)
def test_a_bad_flag_is_one_line(args: list[str], flag: str, bound: str) -> None:
    """The line names the flag and what it may be."""
    with pytest.raises(StartupError) as caught:
        SchedulerConfig.from_args(args)
    message = str(caught.value)
    assert flag in message
    assert bound in message
    assert "\n" not in message


def test_a_bad_variable_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the variable next to the flag."""
    monkeypatch.setenv("OCTAVO_SCHEDULER_MAX_QUEUE", "0")
    with pytest.raises(StartupError, match=r"--max-queue .* OCTAVO_SCHEDULER_MAX_QUEUE"):
        SchedulerConfig.from_args([])


def test_an_open_address_must_be_asked_for() -> None:
    """With --insecure-bind any address will do; loopback needs nothing."""
    assert SchedulerConfig.from_args(["--listen", "0.0.0.0:1", "--insecure-bind"]).insecure_bind
    for listen in ("127.0.0.1:0", "localhost:1", "[::1]:1", "127.1.2.3:1"):
        assert is_loopback(parse_address(SchedulerConfig.from_args(["--listen", listen]).listen)[0])


def test_tls_lifts_the_rule_about_addresses() -> None:
    """What is encrypted may be reached; files are looked at when the service is made."""
    config = SchedulerConfig.from_args(
        ["--listen", "0.0.0.0:1", "--tls-cert", "~/c", "--tls-key", "k", "--tls-client-ca", "a"]
    )
    files = config.tls_files
    assert files is not None
    assert files.paths == (Path.home() / "c", Path("k"), Path("a"))
    assert config.executor_files is None
    assert not config.is_loopback


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a template renders what is not set."""
    for name in ("TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA", "API_KEYS", "EXECUTOR_CA"):
        monkeypatch.setenv(ENV_PREFIX + name, "")
    config = SchedulerConfig.from_args([])
    assert (config.tls_files, config.executor_files, config.api_keys) == (None, None, None)


def test_settings_are_frozen() -> None:
    """They are passed down and never changed."""
    config = SchedulerConfig.from_args([])
    with pytest.raises(pydantic.ValidationError):
        config.max_queue = 1


def test_two_schedulers_have_two_names() -> None:
    """Even where host and process id are the same, as in restarted containers."""
    first, second = (SchedulerConfig.from_args([]).scheduler_id for _ in range(2))
    assert first != second


def test_every_flag_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """--help ends well and shows each flag with a description and a default, in words."""
    with pytest.raises(SystemExit) as caught:
        SchedulerConfig.from_args(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for name, field in SchedulerConfig.model_fields.items():
        assert "--" + name.replace("_", "-") in shown
        assert field.description
    assert shown.count("(default:") == len(SchedulerConfig.model_fields)
    assert not re.search(r"--[a-z-]+ (str|int|float|Path|tuple|[A-Z]*_)", shown)
    assert not re.search(r"factory|None|True|False|\('", shown)
    assert shown.splitlines()[-1] == (
        "Each flag is also an environment variable: --max-queue is OCTAVO_SCHEDULER_MAX_QUEUE."
    )


def run(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the scheduler as a process that is expected to end by itself."""
    command = [sys.executable, "-P", "-m", "scheduler_svc", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_exit_status_tells_bad_flags_from_the_rest(tmp_path: Path) -> None:
    """2 for a wrong flag, 1 for a model that is not there, 0 for help."""
    assert run("--max-queue", "0").returncode == 2
    missing = run("--model", "nope", "--model-store", str(tmp_path))
    assert missing.returncode == 1
    assert missing.stderr.startswith("octavo scheduler: no model 'nope'")
    assert run("--help").returncode == 0


def test_json_logs_carry_the_bound_ids(capsys: pytest.CaptureFixture[str]) -> None:
    """One object per line on stderr, from structlog and the standard library alike."""
    configure_logging("info", "json")
    with bound_ids(request_id="r1"):
        get_logger("a").info("request_finished", num_tokens=3)
        logging.getLogger("b").warning("told %s", "so")
        get_logger("a").debug("left_out")
    get_logger("a").info("unbound")
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.err.splitlines()]
    assert captured.out == ""
    assert [line["event"] for line in lines] == ["request_finished", "told so", "unbound"]
    assert [line.get("request_id") for line in lines] == ["r1", "r1", None]
    assert lines[0]["num_tokens"] == 3
    assert lines[1]["level"] == "warning"


def test_tracebacks_are_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """An unexpected exception is in the log with its place, in both forms."""
    for form in ("json", "console"):
        configure_logging("info", form)
        try:
            raise RuntimeError("unforeseen")
        except RuntimeError:
            get_logger("a").exception("request_failed")
        shown = capsys.readouterr().err
        assert "RuntimeError" in shown
        assert "unforeseen" in shown


def test_metrics_are_served_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nowhere by default; any address will do, since nothing secret is shown."""
    assert SchedulerConfig.from_args([]).metrics_address is None
    monkeypatch.setenv("OCTAVO_SCHEDULER_METRICS_LISTEN", "0.0.0.0:9464")
    assert SchedulerConfig.from_args([]).metrics_address == ("0.0.0.0", 9464)
