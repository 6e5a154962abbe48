"""The reports that reproduce the paper: their form, their search, and a small form of each."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.simulator import reproduce
from scheduler_svc.simulator.reports import all_studies, pages, pictures, render
from scheduler_svc.simulator.reports.findings import (
    Bars,
    Check,
    Claim,
    Findings,
    Line,
    Panel,
    Row,
    Table,
    at_least,
    at_most,
    between,
    exactly,
)
from scheduler_svc.simulator.reports.rates import RatesError, find_sustained
from scheduler_svc.simulator.reports.study import Context, Study
from scheduler_svc.simulator.reports.systems import (
    ALPACA,
    OURS,
    SHAREGPT,
    SYSTEMS,
    CurveJob,
    Job,
    Load,
    run,
    run_curves,
)

_PAPER_STUDIES = {
    study.name: study
    for study in all_studies()
    if study.page == "README.md" and not study.needs_traces
}
_COMMITTED = sorted((Path(__file__).parents[3] / "docs" / "reproduction").glob("*.json"))


@cache
def _small(name: str) -> Findings:
    return _PAPER_STUDIES[name].run(Context(small=True))


# -- the small form of each --------------------------------------------------------


def test_every_figure_of_the_issue_has_a_study() -> None:
    numbers = ("02", "12", "13", "14", "15", "16", "17", "18", "19")
    assert set(_PAPER_STUDIES) >= {f"fig{number}" for number in numbers}


@pytest.mark.parametrize("name", _PAPER_STUDIES)
def test_a_small_form_runs_and_says_how_it_was_made(name: str) -> None:
    """A reader can run it again, and sees the paper's figure beside ours."""
    study, findings = _PAPER_STUDIES[name], _small(name)
    assert any(row.paper is not None for row in findings.rows)
    assert findings.claims
    section = render.as_markdown(study, findings, Context(seed=7, small=True))
    command = f"python -m scheduler_svc.simulator.reproduce {name} --small --seed 7"
    assert command in section
    assert "Seed 7" in section
    assert "| | paper | ours | ours ÷ paper |" in section
    for row in findings.rows:
        assert f"| {row.what} | {render.reference_text(row)} |" in section
    record = json.loads(render.as_json(study, findings, Context(seed=7, small=True)))
    assert record["seed"] == 7
    assert record["command"] == command


def test_a_seed_gives_the_same_bytes() -> None:
    study, context = _PAPER_STUDIES["fig02"], Context(seed=3, small=True)
    first, again, other = (
        render.as_json(study, study.run(each), each)
        for each in (context, context, replace(context, seed=4))
    )
    assert first == again
    assert json.loads(first)["rows"] != json.loads(other)["rows"]


# -- what the paper claims, in its direction ---------------------------------------


def test_less_reserved_is_a_higher_rate_sustained() -> None:
    """Paging ≥ Oracle ≥ Pow2 ≥ Max ≥ static batching, in requests a second."""
    guesses = (2.5, 1.2, 0.8, 0.5, 0.2)
    searches = {
        system: CurveJob(
            Job(Load(SHAREGPT, guess, 200.0, seed=1), system=system), precision=0.1, low_points=()
        )
        for system, guess in zip(SYSTEMS, guesses, strict=True)
    }
    curves = run_curves(Context(), searches)
    rates = [curves[system].sustained for system in SYSTEMS]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 1.5 * rates[1]


def test_more_samples_and_wider_beams_save_more() -> None:
    """What is shared grows with the number of sequences, and beams share most."""

    def saved(**how: int) -> float:
        width = max(how.values())
        load = Load(ALPACA, 12 / width, 60 * width / 12, seed=1, **how)
        return run(Job(load)).saved_by_sharing

    parallel = [saved(n=width) for width in (1, 2, 4, 6)]
    beams = [saved(beam_width=width) for width in (2, 4, 6)]
    assert parallel == sorted(parallel)
    assert beams == sorted(beams)
    assert parallel[0] == 0 < parallel[1]
    assert all(a < b for a, b in zip(parallel[1:], beams, strict=True))


# -- what is committed -------------------------------------------------------------


def test_there_are_committed_reports() -> None:
    assert {path.stem for path in _COMMITTED} >= set(_PAPER_STUDIES)


@pytest.mark.parametrize("path", _COMMITTED, ids=lambda path: path.stem)
def test_every_committed_difference_is_explained(path: Path) -> None:
    """Off by more than 10%: a cause in words, and with that changed ours meets the paper's."""
    record = json.loads(path.read_text(encoding="utf-8"))
    assert not record["small"]
    for row in record["rows"]:
        off = row["ratio"] is not None and abs(row["ratio"] - 1) > 0.10
        assert row["is_off"] == off
        if off:
            assert any(mark.isdigit() for mark in row["explanation"]), row["what"]
            if record["reference"] == "paper":
                assert row["is_explained"] and row["checks"], row["what"]
    for claim in record["claims"]:
        assert claim["detail"], claim["text"]


@pytest.mark.parametrize("path", _COMMITTED, ids=lambda path: path.stem)
def test_every_committed_report_is_on_its_page(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    study = next(each for each in all_studies() if each.name == record["name"])
    page = (path.parent / study.page).read_text(encoding="utf-8")
    section = page.split(f"<!-- begin {study.name} -->")[1].split(f"<!-- end {study.name} -->")[0]
    assert record["command"] in section
    assert all(f"| {row['what']} |" in section for row in record["rows"])
    if record["panels"]:
        assert f"({study.name}.png)" in section
        assert (path.parent / f"{study.name}.png").stat().st_size > 0


# -- the form ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paper", "ours", "ratio"),
    [
        (exactly(2.0), 3.0, 1.5),
        (between(1.7, 2.7), 2.0, 1.0),
        (between(1.7, 2.7), 5.4, 2.0),
        (between(1.7, 2.7), 0.85, 0.5),
        (at_most(1.2), 0.1, 1.0),
        (at_most(1.2), 2.4, 2.0),
        (at_least(10), 5.0, 0.5),
        (at_least(10), 50.0, 1.0),
    ],
)
def test_a_range_is_compared_by_its_nearer_bound(paper: Any, ours: float, ratio: float) -> None:
    assert Row("x", ours, paper).ratio == pytest.approx(ratio)


def test_only_what_is_off_is_explained() -> None:
    near = Row("near", 1.05, exactly(1.0), explanation="not needed")
    far = Row("far", 1.25, exactly(1.0), explanation="the reason")
    study = _study(Findings("s", rows=[near, far]))
    section = render.as_markdown(study, study.run(Context()), Context())
    assert "the reason" in section
    assert "not needed" not in section
    assert "**1.25**" in section
    assert far.as_dict()["explanation"] == "the reason"
    assert near.as_dict()["explanation"] == ""


@pytest.mark.parametrize(
    ("checks", "is_explained"),
    [
        ((), False),
        ((1.4,), False),
        ((1.05,), True),
        ((0.7,), True),
        ((1.6, 1.08), True),
    ],
)
def test_a_cause_explains_a_difference_if_it_can_take_it_away(
    checks: tuple[float, ...], is_explained: bool
) -> None:
    """Changed as far as it may be, ours meets the figure or is on its other side."""
    row = Row("far", 1.25, exactly(1.0), "x", "the reason", [Check(c, "less") for c in checks])
    assert row.is_explained == is_explained
    assert row.as_dict()["is_explained"] == is_explained
    study = _study(Findings("s", rows=[row]))
    section = render.as_markdown(study, study.run(Context()), Context())
    for value in checks:
        assert f"{value:.2f}\N{MULTIPLICATION SIGN} with less" in section
    assert Row("near", 1.05, exactly(1.0)).is_explained
    assert Row("unpublished", 1.05).is_explained


def test_a_figure_without_reference_says_so() -> None:
    study = _study(Findings("s", rows=[Row("new", 0.5, None, "share")], reference="wanted"))
    section = render.as_markdown(study, study.run(Context()), Context())
    assert "| new | not published | 50.0% | \N{EN DASH} |" in section
    assert "ours ÷ wanted" in section


def test_a_claim_that_does_not_hold_is_told() -> None:
    findings = Findings("s", claims=[Claim("a", True, "1"), Claim("b", False, "2 > 1")])
    study = _study(findings)
    assert "b: **does not hold** (2 > 1)" in render.as_markdown(study, findings, Context())
    lines = render.summary_lines([(study, findings)])
    assert "1 of 2 claims hold" in lines
    assert any("does not hold: b (2 > 1)" in line for line in lines)


def test_wrong_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="unit must be one of"):
        Row("x", 1.0, unit="furlongs")
    with pytest.raises(ValueError, match="ours must be finite"):
        Row("x", float("nan"))
    with pytest.raises(ValueError, match="must have 2 cells"):
        Table("t", ("a", "b"), [("1",)])
    with pytest.raises(ValueError, match="name must be"):
        _study(Findings("s"), name="No Name")


# -- pages and pictures ------------------------------------------------------------


def test_what_was_written_by_hand_stays() -> None:
    study = _study(Findings("s"))
    page = "# Title\n\nBefore.\n\n<!-- begin one -->\nold\n<!-- end one -->\n\nAfter.\n"
    assert pages.put_section(page, study, "new\n") == page.replace("old", "new")


def test_a_study_that_is_new_comes_last() -> None:
    study = _study(Findings("s"))
    page = pages.put_section("# Title\n", study, "text")
    assert page == "# Title\n\n## Title of one\n\n<!-- begin one -->\ntext\n<!-- end one -->\n"
    assert pages.put_section(page, study, "other") == page.replace("\ntext\n", "\nother\n")


@pytest.mark.parametrize(
    "page",
    [
        "<!-- begin one -->",
        "<!-- end one -->",
        "<!-- end one --><!-- begin one -->",
        "<!-- begin one --><!-- begin one --><!-- end one -->",
    ],
)
def test_broken_markers_are_refused(page: str) -> None:
    with pytest.raises(pages.PageError, match="once"):
        pages.put_section(page, _study(Findings("s")), "text")


def test_lines_and_bars_make_a_picture(tmp_path: Path) -> None:
    panels = [
        Panel("a", "x", "y", lines=[Line("l", [1, 2], [3, 4])], log_x=True, bound=3.5),
        Panel("b", "", "y", bars=[Bars("l", [1, 2]), Bars("m", [2, 3])], x_names=["p", "q"]),
        Panel("c", "", "y", bars=[Bars("l", [1, 2]), Bars("m", [2, 3])], stacked=True),
    ]
    path = tmp_path / "p.png"
    pictures.draw(panels, path, title="three")
    first = path.read_bytes()
    assert first.startswith(b"\x89PNG")
    pictures.draw(panels, path, title="three")
    assert path.read_bytes() == first
    with pytest.raises(pictures.PicturesError, match="cannot write"):
        pictures.draw(panels, tmp_path / "no" / "p.png", title="three")


# -- the search --------------------------------------------------------------------


@pytest.mark.parametrize("guess", [0.5, 7.0, 9.2, 200.0])
def test_the_search_finds_the_crossing_from_anywhere(guess: float) -> None:
    """Of a queue's latency, 0.05 / (1 - rate / 10): it is 0.5 at a rate of 9."""

    def latency(rate: float) -> float:
        return 0.05 / (1 - rate / 10) if rate < 10 else 1e6 * rate

    curve = find_sustained(latency, guess=guess, bound=0.5, precision=0.02)
    assert curve.sustained == pytest.approx(9.0, rel=0.02)
    assert curve.rates == sorted(curve.rates)
    assert all(y == latency(x) for x, y in curve.points)
    assert any(rate < 0.5 * curve.sustained for rate in curve.rates)


def test_a_search_without_a_crossing_ends() -> None:
    with pytest.raises(RatesError, match="does not cross 1 s/token"):
        find_sustained(lambda rate: 0.5, guess=1.0, bound=1.0)


# -- the command -------------------------------------------------------------------


def _study(findings: Findings, name: str = "one") -> Study:
    return Study(name, f"Title of {name}", "Is it?", lambda context: findings)


def test_the_command_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON, plot and section; the same in one process and in two."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for jobs, folder in zip(("1", "2"), folders, strict=True):
        words = ["fig02", "fig15", "--small", "--out", str(folder), "--jobs", jobs]
        assert reproduce.main(words) == 0
    first, second = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders)
    assert first.keys() == {
        *(f"{name}.{kind}" for name in ("fig02", "fig15") for kind in ("json", "png")),
        "README.md",
    }
    assert {k: v for k, v in first.items() if k != "README.md"} == {
        k: v for k, v in second.items() if k != "README.md"
    }
    output = capsys.readouterr()
    assert "Octavo: token states" in output.out
    assert "2 of 2 studies" in output.err


def test_a_small_run_writes_nothing_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "all_studies", lambda: [_study(Findings("s"))])
    assert reproduce.main(["--small", "--jobs", "1"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert "nothing was written" in capsys.readouterr().out


def test_one_failure_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(context: Context) -> Findings:
        raise RuntimeError("it broke")

    studies = [Study("bad", "Bad", "Is it?", fail), _study(Findings("s"))]
    monkeypatch.setattr(reproduce, "all_studies", lambda: studies)
    assert reproduce.main(["--jobs", "1", "--out", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert "failed: bad" in output.out
    assert "RuntimeError: it broke" in output.err
    assert (tmp_path / "one.json").exists()
    assert not (tmp_path / "bad.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "there is no study 'nothing'"),
        (["fig17_real"], "--traces FOLDER is needed for fig17_real"),
        (["--jobs", "0"], "must be from 1 to"),
        (["--traces", "no-such-folder"], "--traces must be a folder"),
    ],
)
def test_what_is_wrong_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        reproduce.main(words)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_systems_are_compared_on_the_same_requests() -> None:
    """A longer trace begins with the shorter one, for every system."""
    short, long = (Load(SHAREGPT, 2.0, seconds, seed=5).requests() for seconds in (20.0, 60.0))
    assert long[: len(short)] == short
    found = {
        system: run(Job(Load(SHAREGPT, 1.0, 30.0, seed=5), system=system)) for system in SYSTEMS
    }
    assert len({report.num_prompt_tokens for report in found.values()}) == 1
    assert all(report.num_finished == report.num_requests for report in found.values())
    assert found[OURS].system == OURS
