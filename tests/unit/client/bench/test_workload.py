from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from octavo_client.bench.workload import (
    Request,
    WorkloadError,
    cap_lengths,
    draw_sharegpt,
    poisson_arrivals,
    read_requests,
    read_trace,
    scale_arrivals,
)


def _write(folder: Path, content: object) -> Path:
    path = folder / "w.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_requests_are_read_as_written(tmp_path: Path) -> None:
    """Id and arrival may be left out; the rest is taken as it is."""
    path = _write(
        tmp_path,
        [{"id": "a", "prompt": [1, 2], "out": 3, "arrival": 0.5}, {"prompt": [4], "out": 1}],
    )
    assert read_requests(path) == [Request("a", (1, 2), 3, 0.5), Request("1", (4,), 1, 0.0)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[{", "line 1, column 3"),
        ({}, "array"),
        ([], "at least one"),
        ([[1]], "request 0: must be an object"),
        ([{"prompt": [1], "out": 1}, {"prompt": [1]}], "request 1: field 'out' is missing"),
        ([{"out": 1}], "field 'prompt' is missing"),
        ([{"prompt": [], "out": 1}], "field 'prompt'"),
        ([{"prompt": ["x"], "out": 1}], "field 'prompt'"),
        ([{"prompt": [1], "out": 0}], "field 'out'"),
        ([{"prompt": [1], "out": True}], "field 'out'"),
        ([{"prompt": [1], "out": 1, "arrival": -1}], "field 'arrival'"),
    ],
)
def test_bad_requests_name_entry_and_field(tmp_path: Path, content: object, said: str) -> None:
    """What is wrong in a file is named by entry and field."""
    with pytest.raises(WorkloadError) as caught:
        read_requests(_write(tmp_path, content))
    assert said in str(caught.value)
    assert "w.json" in str(caught.value)


def test_missing_files_are_workload_errors(tmp_path: Path) -> None:
    """A file that is not there is named, for both kinds."""
    with pytest.raises(WorkloadError, match="nowhere"):
        read_requests(tmp_path / "nowhere.json")
    with pytest.raises(WorkloadError, match="nowhere"):
        read_trace(tmp_path / "nowhere.csv.gz", max_requests=None, vocab_size=2000, seed=0)


def test_trace_gives_lengths_and_times(tmp_path: Path) -> None:
    """A gzipped trace keeps lengths and gaps; its first arrival becomes 0."""
    path = tmp_path / "t.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("arrival_s,prompt_tokens,output_tokens,client\n10,3,5,x\n12.5,2,7,y\n99,1,1,z\n")
    requests = read_trace(path, max_requests=2, vocab_size=2000, seed=1)
    assert [len(request.prompt) for request in requests] == [3, 2]
    assert [request.num_output_tokens for request in requests] == [5, 7]
    assert [request.arrival_seconds for request in requests] == [0.0, 2.5]
    assert all(1000 <= token < 2000 for request in requests for token in request.prompt)
    assert requests == read_trace(path, max_requests=2, vocab_size=2000, seed=1)
    assert requests != read_trace(path, max_requests=2, vocab_size=2000, seed=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arrival_s,prompt_tokens\n0,1\n", "column 'output_tokens' is missing"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1,1\n0,x,1\n", "line 3: column 'prompt_tokens'"),
        ("arrival_s,prompt_tokens,output_tokens\nsoon,1,1\n", "line 2: column 'arrival_s'"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1\n", "line 2: column 'output_tokens'"),
        ("arrival_s,prompt_tokens,output_tokens\n", "has no requests"),
    ],
)
def test_bad_traces_name_line_and_column(tmp_path: Path, text: str, said: str) -> None:
    """What is wrong in a trace is named by line and column."""
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError) as caught:
        read_trace(path, max_requests=None, vocab_size=2000, seed=0)
    assert said in str(caught.value)


def test_a_file_that_is_not_gzip_is_an_error(tmp_path: Path) -> None:
    """Garbage under a .gz name is named, not a traceback."""
    path = tmp_path / "t.csv.gz"
    path.write_bytes(b"not gzip at all")
    with pytest.raises(WorkloadError, match=r"t\.csv\.gz"):
        read_trace(path, max_requests=None, vocab_size=2000, seed=0)


def test_sharegpt_has_the_published_means() -> None:
    """Drawn lengths have means near 161 and 338 tokens, and repeat with their seed."""
    requests = draw_sharegpt(num_requests=4000, vocab_size=2000, seed=3)
    mean_prompt = sum(len(request.prompt) for request in requests) / 4000
    mean_output = sum(request.num_output_tokens for request in requests) / 4000
    assert mean_prompt == pytest.approx(161.31, rel=0.1)
    assert mean_output == pytest.approx(337.99, rel=0.1)
    assert requests[:10] == draw_sharegpt(num_requests=10, vocab_size=2000, seed=3)


def test_poisson_arrivals_have_the_rate() -> None:
    """Gaps of Poisson arrivals have mean 1 / rate, and as large a deviation."""
    spaced = poisson_arrivals([Request("x", (1,), 1)] * 4001, 8.0, seed=0)
    times = [request.arrival_seconds for request in spaced]
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 8, rel=0.1)
    assert deviation == pytest.approx(1 / 8, rel=0.1)


def test_caps_and_scales() -> None:
    """Caps only shorten; a scale of 2 halves the times; None caps nothing."""
    request = Request("x", (1, 2, 3), 10, 4.0)
    assert cap_lengths([request], max_prompt=2, max_output=4) == [Request("x", (1, 2), 4, 4.0)]
    assert cap_lengths([request], max_prompt=9, max_output=99) == [request]
    assert cap_lengths([request], max_prompt=None, max_output=None) == [request]
    assert scale_arrivals([request], 2.0) == [Request("x", (1, 2, 3), 10, 2.0)]
