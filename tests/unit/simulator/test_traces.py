"""Recorded workloads in each of their forms."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from scheduler_svc.simulator import WorkloadError, traces


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_csv_is_read_by_arrival(tmp_path: Path) -> None:
    """The first request is at 0; an output of 0 tokens is one that stopped at once: 1."""
    text = "arrival_s,prompt_tokens,output_tokens\n7.5,20,0\n5.5,10,3\n"
    first, second = traces.read(write(tmp_path / "a.csv", text))
    assert (first.arrival, first.num_prompt, first.num_output) == (0.0, 10, 3)
    assert (second.arrival, second.num_prompt, second.num_output) == (2.0, 20, 1)


def test_hashes_and_clients_become_prefixes_and_tenants(tmp_path: Path) -> None:
    """Runs of ids are written a-b; each stands for 512 tokens."""
    text = "arrival_s,prompt_tokens,output_tokens,block_hashes,client\n0,1500,3,0 14-16,alice\n"
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(text.encode()))
    (request,) = traces.read(path)
    assert request.prefix_ids == (0, 14, 15, 16)
    assert request.prefix_tokens == 512
    assert request.tenant == "alice"


def test_azures_own_csv_is_read(tmp_path: Path) -> None:
    """Times with seven digits of a second, with and without a zone."""
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690+00:00,396,109\n"
    )
    first, second = traces.read(write(tmp_path / "azure.csv", text))
    assert second.arrival - first.arrival == pytest.approx(4.314579, abs=1e-5)
    assert (second.num_prompt, second.num_output) == (396, 109)


def test_mooncakes_own_lines_are_read(tmp_path: Path) -> None:
    """Milliseconds, and hash ids in a list."""
    line = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [46, %d]}\n'
    path = write(tmp_path / "m.jsonl", line % (1000, 47) + line % (4000, 48))
    first, second = traces.read(path)
    assert second.arrival == 3.0
    assert (first.prefix_ids, second.prefix_ids) == ((46, 47), (46, 48))


def test_only_so_many_are_read(tmp_path: Path) -> None:
    """The rest of the file is not looked at."""
    text = "arrival_s,prompt_tokens,output_tokens\n0,1,1\n,1,1\nnever,looked,at\n"
    assert len(traces.read(write(tmp_path / "a.csv", text), 2)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arrival_s,prompt_tokens\n0,1\n", "column 'output_tokens' is missing"),
        ("arrival_s,prompt_tokens,output_tokens\n0,x,1\n", "line 2: column 'prompt_tokens'"),
        ("arrival_s,prompt_tokens,output_tokens\n-1,1,1\n", "line 2: column 'arrival_s'"),
        ("arrival_s,prompt_tokens,output_tokens,block_hashes\n0,1,1,9-1\n", "'block_hashes'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", "line 2: column 'TIMESTAMP'"),
        ('{"timestamp": 0, "input_length": 1}\n', "line 1: field 'output_length' must be a"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 2.5}\n', "must be a whole number"),
        ('{"timestamp": 1e300, "input_length": 1, "output_length": 1}\n', "field 'timestamp'"),
        ('{"timestamp": 0, "hash_ids": {"a": 1}}\n', "field 'hash_ids' must be whole numbers"),
        ('{"timestamp":' + "[" * 100_000 + "\n", "line 1: not JSON"),
        ("arrival_s,prompt_tokens,output_tokens\n1e300,1,1\n", "seconds from 0 to 1e"),
        ('{"timestamp": 0\n', "line 1: "),
        ("arrival_s,prompt_tokens,output_tokens\n", "has no requests"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    """The file, the line and the column."""
    path = write(tmp_path / "a.csv", text)
    with pytest.raises(WorkloadError, match=message) as caught:
        traces.read(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    """Bytes that are no UTF-8, and a file that only says that it is gzip."""
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkloadError, match="not a trace"):
        traces.read(tmp_path / "a.csv")
    (tmp_path / "a.csv.gz").write_bytes(b"plain")
    with pytest.raises(WorkloadError, match="gzip"):
        traces.read(tmp_path / "a.csv.gz")
