"""Settings: where they come from, and what is refused in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from executor_svc.config import ExecutorConfig, read_config
from executor_svc.errors import StartupError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_MODEL_STORE", raising=False)


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags beat variables, variables beat defaults."""
    monkeypatch.setenv("OCTAVO_EXECUTOR_BLOCK_SIZE", "32")
    monkeypatch.setenv("OCTAVO_EXECUTOR_MAX_NUM_ROWS", "8")
    config = read_config(["--block-size", "64"])
    assert (config.block_size, config.max_num_rows, config.num_blocks) == (64, 8, 0)


def test_model_store_variable_is_shared_with_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """OCTAVO_MODEL_STORE sets the store; the executor's own variable wins over it."""
    assert read_config([]).model_store == Path.home() / ".cache/octavo/models"
    monkeypatch.setenv("OCTAVO_MODEL_STORE", "/srv/models")
    assert read_config([]).model_store == Path("/srv/models")
    monkeypatch.setenv("OCTAVO_EXECUTOR_MODEL_STORE", "/srv/others")
    assert read_config([]).model_store == Path("/srv/others")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-such-flag", "1"], "--no-such-flag"),
        (["--block-size", "7"], "--block-size"),
        (["--block-size", "129"], "--block-size"),
        (["--num-blocks", "many"], "--num-blocks"),
        (["--memory-utilization", "1.5"], "--memory-utilization"),
        (["--dtype", "int8"], "--dtype"),
        (["--listen", "localhost"], "--listen"),
        (["--listen", "localhost:65536"], "--listen"),
        (["--metrics-listen", "9464"], "--metrics-listen"),
        (["--listen", "0.0.0.0:50061"], "--insecure-bind"),
        (["--tls-cert", "c"], "--tls-cert: needs --tls-key"),
        (["--tls-key", "k"], "--tls-key: needs --tls-cert"),
        (["--tls-client-ca", "c"], "--tls-client-ca: needs --tls-cert"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(flags: list[str], words: str) -> None:
    """Whatever is wrong, the message is one line with the flag in it."""
    with pytest.raises(StartupError) as caught:
        read_config(flags)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_addresses_need_insecure_bind() -> None:
    """A port without TLS binds beyond loopback only when told so."""
    assert read_config(["--listen", "0.0.0.0:1", "--insecure-bind"]).listen == "0.0.0.0:1"
    assert read_config(["--listen", "[::1]:0"]).listen == "[::1]:0"


def test_tls_lifts_the_rule_about_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is encrypted may be reached; a variable that is empty is none."""
    monkeypatch.setenv("OCTAVO_EXECUTOR_TLS_CLIENT_CA", "")
    config = read_config(["--listen", "0.0.0.0:1", "--tls-cert", "c", "--tls-key", "k"])
    assert config.tls_files is not None
    assert config.tls_files.paths == (Path("c"), Path("k"))
    assert read_config([]).tls_files is None


def test_every_flag_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    """--help names every setting with its text and its default."""
    with pytest.raises(SystemExit) as caught:
        read_config(["--help"])
    assert caught.value.code in (0, None)
    shown = capsys.readouterr().out
    text = " ".join(shown.split())
    for name, field in ExecutorConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description, name
    assert "(default: 16)" in text
    assert text.count("(default:") == len(ExecutorConfig.model_fields)
    assert not re.search(r"--[a-z-]+ (str|int|float|Path|tuple|[A-Z]*_)", text)
    assert not re.search(r"factory|None|True|False", text)
    assert shown.splitlines()[-1] == (
        "Each flag is also an environment variable: --block-size is OCTAVO_EXECUTOR_BLOCK_SIZE."
    )


def test_metrics_are_served_where_they_are_asked_for() -> None:
    """Nowhere by default; any address will do, since nothing secret is shown."""
    assert read_config([]).metrics_address is None
    assert read_config(["--metrics-listen", "0.0.0.0:9464"]).metrics_address == ("0.0.0.0", 9464)
    assert read_config(["--metrics-listen", "[::1]:0"]).metrics_address == ("::1", 0)
