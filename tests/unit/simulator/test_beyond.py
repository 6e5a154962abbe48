"""The studies beyond the paper, in their small form: what does not depend on size holds.

In the small form figures mean little. What must hold at any size: nothing is lost, equal seeds
give equal findings, and the directions of what is claimed.
"""

from __future__ import annotations

import csv
import gzip
import random
from pathlib import Path

import pytest

from scheduler_svc.simulator.reports import all_studies
from scheduler_svc.simulator.reports.findings import Findings
from scheduler_svc.simulator.reports.study import Context, Study

_OURS = [study for study in all_studies() if study.name.startswith("beyond_")]
_DRAWN = [study for study in _OURS if not study.needs_traces]
_NEED_TRACES = [study for study in _OURS if study.needs_traces]
_NOTHING_LOST = (
    "Every request ends",
    "Nobody is lost",
    "Nothing is lost",
)


def _write(path: Path, header: list[str], rows: list[list[object]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Small files of the same form and names as the public traces."""
    draw = random.Random(7)
    columns = ["arrival_s", "prompt_tokens", "output_tokens"]
    _write(
        tmp_path / "azure2023_conv.csv.gz",
        columns,
        [[i * 0.2, draw.randint(20, 1500), draw.randint(5, 300)] for i in range(60)],
    )
    _write(
        tmp_path / "arena_vtc.csv.gz",
        [*columns, "client"],
        [
            [i * 0.1, draw.randint(20, 400), draw.randint(20, 300), min(3, draw.randrange(9))]
            for i in range(200)
        ],
    )
    shared = [
        [i * 0.3, 2048 + draw.randint(1, 400), 20, f"{4 * (i % 5)}-{4 * (i % 5) + 3}"]
        for i in range(40)
    ]
    _write(tmp_path / "mooncake_conversation.csv.gz", [*columns, "block_hashes"], shared)
    return tmp_path


def _check(study: Study, found: Findings) -> None:
    assert found.setup
    assert found.claims
    assert found.tables or found.panels
    for claim in found.claims:
        if claim.text.startswith(_NOTHING_LOST):
            assert claim.holds, f"{study.name}: {claim.text} {claim.detail}"
    for panel in found.panels:
        for line in panel.lines:
            assert len(line.xs) == len(line.ys), (study.name, panel.title, line.label)
        for bars in panel.bars:
            assert len(bars.values) == len(panel.x_names), (study.name, panel.title, bars.label)


@pytest.mark.parametrize("study", _DRAWN, ids=lambda study: study.name)
def test_drawn_workloads(study: Study) -> None:
    """Each study runs on drawn workloads, loses nothing, and draws what it says."""
    _check(study, study.run(Context(seed=0, small=True)))


@pytest.mark.parametrize("study", _NEED_TRACES, ids=lambda study: study.name)
def test_recorded_workloads(study: Study, traces: Path) -> None:
    """Each study of a trace reads the file of that name in the folder it is given."""
    _check(study, study.run(Context(seed=0, small=True, traces=traces)))


def test_same_seed_same_findings() -> None:
    """Findings are a function of the seed: a page made again is the same page."""
    (study,) = (each for each in _OURS if each.name == "beyond_fairness")
    once, again, other = (study.run(Context(seed=seed, small=True)) for seed in (1, 1, 2))
    assert once.as_dict() == again.as_dict()
    assert once.as_dict() != other.as_dict()


def test_prefix_routing_finds_more_in_the_cache() -> None:
    """Requests sent to where their beginning is cached compute less than requests in turn."""
    (study,) = (each for each in _OURS if each.name == "beyond_routing")
    (table,) = study.run(Context(seed=0, small=True)).tables
    computed = {row[0]: float(row[table.header.index("computed, millions")]) for row in table.rows}
    assert computed["placement"] < computed["round-robin"]


def test_chunks_shorten_the_longest_gap() -> None:
    """The fewer tokens a step computes, the shorter is the longest gap between two tokens."""
    (study,) = (each for each in _OURS if each.name == "beyond_chunks")
    (table,) = study.run(Context(seed=0, small=True)).tables
    longest = [float(row[table.header.index("ITL max")]) for row in table.rows]
    assert longest == sorted(longest)
    assert longest[0] < longest[-1]
