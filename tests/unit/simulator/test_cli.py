"""`octavo simulate`: figures for people and for programs, errors in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler_svc.simulator.cli import main

SMALL = ["--model", "opt-13b", "--workload", "alpaca", "--requests", "20", "--rate", "5"]


def test_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """What was served, how fast, and where the slots were."""
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    assert "20 of 20 requests finished" in out
    for label in ("rate", "K/V slots", "normalized s/token", "between tokens ms"):
        assert label in out


@pytest.mark.parametrize("system", ["octavo", "static", "orca-oracle", "orca-pow2", "orca-max"])
def test_each_system_gives_json(system: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but JSON is on standard output."""
    assert main([*SMALL, "--system", system, "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["system"] == system
    assert figures["num_finished"] == 20


def test_flags_reach_the_simulation(tmp_path: Path) -> None:
    """Executors, failures, samples and a file for the figures."""
    path = tmp_path / "found.json"
    flags = ["--executors", "2", "--router", "round-robin", "--fail-at", "0.5:1", "--samples", "2"]
    assert main([*SMALL, *flags, "--preemption", "swap", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert figures["num_deaths"] == 1
    assert figures["max_executors"] == 2
    assert figures["saved_by_sharing"] > 0


def test_a_trace_and_a_calibration_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A measured machine under recorded requests, twice as fast; only so long."""
    calibration = tmp_path / "cpu.json"
    calibration.write_text(json.dumps({"num_blocks": 100, "seconds": {"fixed": 0.5}}))
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,4\n8,10,4\n100,10,4\n")
    flags = ["--calibration", str(calibration), "--trace", str(trace), "--speed", "2"]
    assert main([*flags, "--seconds", "10", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_finished"] == 2
    assert figures["seconds"] == 6.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace", "/nowhere/at.all"], "No such file"),
        (["--calibration", "/nowhere/at.all"], "No such file"),
        (["--model", "llama-3.1-70b", "--gpu", "a100-40gb"], "takes 141 GB"),
        (
            ["--executors", "2", "--fail-at", "1:2"],
            "--fail-at: index must be below --executors (2)",
        ),
        (["--max-num-seqs", "4096"], "--max-num-batched-tokens must be larger than --max-num-seqs"),
        (["--autoscale", "3:2"], "--autoscale: MIN must be from 1 to MAX (2)"),
    ],
)
def test_an_error_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the field and the bound, and the status is 2."""
    assert main([*flags, "--requests", "2"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_what_is_wrong_in_a_file_keeps_the_name_it_has_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not that of a flag."""
    calibration = tmp_path / "cpu.json"
    calibration.write_text(json.dumps({"num_blocks": 0, "seconds": {"fixed": 0.5}}))
    assert main(["--calibration", str(calibration), "--requests", "2"]) == 2
    assert f"{calibration}: num_blocks must be a whole number from 1" in capsys.readouterr().err


def test_a_flag_out_of_bounds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """By the parser, with its name."""
    with pytest.raises(SystemExit) as caught:
        main(["--executors", "0"])
    assert caught.value.code == 2
    assert "--executors: must be a whole number from 1 to 100000, got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "1e-300"], "--rate: must be a number from 1e-06 to 1e+06"),
        (["--rate", "nan"], "--rate: must be a number"),
        (["--rate", "abc"], "got 'abc'"),
        (["--seconds", "1e308"], "--seconds: must be a number from 0.001 to 1e+08"),
        (["--executors", "100000000"], "--executors: must be a whole number from 1 to 100000"),
        (["--num-blocks", "999999999999"], "--num-blocks: must be a whole number"),
        (["--failures-per-hour", "1e9"], "--failures-per-hour: must be a number from 0 to 3600"),
        (["--fail-at", "5"], "--fail-at: must be SECONDS:EXECUTOR, got '5'"),
        (["--fail-at", "abc:1"], "--fail-at: must be a number"),
        (["--autoscale", "1"], "--autoscale: must be MIN:MAX, got '1'"),
        (["--autoscale", "1:x"], "--autoscale: must be a whole number"),
        (["--samples", "1.5"], "--samples: must be a whole number"),
    ],
)
def test_flags_have_bounds(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the flag and the bound."""
    with pytest.raises(SystemExit) as ended:
        main([*flags, "--requests", "2"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--system", "orca-max", "--model", "opt-13b", "--executors", "5"],
            "--executors has no effect with --system orca-max",
        ),
        (["--trace", "t.csv", "--workload", "chat"], "--workload has no effect with --trace"),
        (["--calibration", "c.json", "--tp", "2"], "--tp has no effect with --calibration"),
        (["--json", "no/such/folder/out.json"], "--json no/such/folder/out.json: No such file"),
    ],
)
def test_what_would_be_without_effect_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is simulated."""
    assert main([*flags, "--requests", "2"]) == 2
    assert message in capsys.readouterr().err


def test_a_load_that_nothing_can_serve_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """The table is printed, and the exit code is not 0."""
    assert main(["--num-blocks", "1", "--requests", "3"]) == 1
    captured = capsys.readouterr()
    assert "0 of 3 requests finished" in captured.out
    assert "no request could be served" in captured.err
