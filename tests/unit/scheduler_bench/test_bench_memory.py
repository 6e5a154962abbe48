"""The modelled memory benchmark counts what can be counted by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from scheduler_svc.bench_memory import Arrival, StepTime, draw, main, simulate
from scheduler_svc.core.state import CoreConfig

CONFIG = CoreConfig(num_blocks=1000, block_size=16)
STEP_TIME = StepTime(0.01, 0.0)


def test_one_sample_shares_nothing() -> None:
    """Without samples to share with, no block is saved and nothing is copied."""
    figures = simulate([Arrival(0.0, 100, 50)], CONFIG, 1, STEP_TIME)
    assert figures.saved_by_sharing == 0.0
    assert figures.num_copied_blocks == 0
    assert 0.9 < figures.kv_use <= 1.0


def test_saving_of_a_long_prompt_is_nearly_all_of_its_copies() -> None:
    """Four samples of a prompt much longer than their outputs need a quarter of the blocks."""
    figures = simulate([Arrival(0.0, 16 * 64, 160)], CONFIG, 4, STEP_TIME)
    # 64 blocks shared by four, and on average five of each one's own: 256 + 20 against 84.
    assert figures.saved_by_sharing == pytest.approx(192 / 276, abs=0.02)


def test_drawn_lengths_have_the_published_means() -> None:
    """The means in and out are those of the paper's data set, whatever the spread."""
    arrivals = draw("sharegpt", 20_000, rate=1.0, sigma=0.7, seed=1)
    mean_in = sum(a.num_prompt for a in arrivals) / len(arrivals)
    mean_out = sum(a.num_output for a in arrivals) / len(arrivals)
    assert mean_in == pytest.approx(161.31, rel=0.03)
    assert mean_out == pytest.approx(337.99, rel=0.03)


def test_a_trace_is_read_capped_and_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gzipped trace runs to its end, and its longest requests are cut to the caps."""
    trace = tmp_path / "trace.csv.gz"
    rows = "arrival_s,prompt_tokens,output_tokens\n0.0,5000,9\n0.5,20,1\n"
    trace.write_bytes(gzip.compress(rows.encode()))
    assert main(["--trace", str(trace), "--max-prompt", "64"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_requests"] == 2
    assert figures["num_steps"] < 30


def test_a_missing_trace_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there ends with a status and one line."""
    assert main(["--trace", "/nowhere/at.all"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
