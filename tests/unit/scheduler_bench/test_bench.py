"""`octavo bench core`: the load is what it says, and the figures are of that load."""

from __future__ import annotations

import json

import pytest

from scheduler_svc import bench


def _run(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert bench.main(list(flags)) == 0
    return capsys.readouterr().out


def test_json_is_the_only_output_and_holds_load_and_figures(capsys) -> None:
    """For scripts: one object, with the names that the documentation uses."""
    flags = ["--running", "8", "--queued", "3", "--context", "40", "--steps", "20"]
    report = json.loads(_run(capsys, *flags, "--json", "-"))
    assert (report["running"], report["queued"], report["context"]) == (8, 3, 40)
    assert report["steps"] == 20
    for name in ("plan_apply_us", "plan_bytes"):
        assert 0 < report[name]["min"] <= report[name]["p50"] <= report[name]["p99"]


def test_a_sweep_measures_every_context(capsys, tmp_path, monkeypatch) -> None:
    """One point each, in the file; the table goes to the terminal."""
    monkeypatch.setattr(bench, "_SWEEP_CONTEXTS", (20, 60))
    path = tmp_path / "out.json"
    flags = ["--running", "4", "--steps", "10", "--sweep", "--json", str(path)]
    table = _run(capsys, *flags)
    points = json.loads(path.read_text())["points"]
    assert [point["context"] for point in points] == [20, 60]
    assert len(table.splitlines()) == 3


def test_everyone_decodes_and_the_queue_waits() -> None:
    """Each step samples every running sequence, two are in flight, and nobody is let in."""
    core = bench.steady_core(bench.Load(running=8, queued=5, context=20, executors=1), 40)
    for _ in range(40):
        bench._step(core)
        assert len(core.state.decode_set.members) == 8
        assert len(core.state.in_flight) == 1, "the second is planned first in a step"
        assert len(core.state.waiting) == 5
    assert core.state.counters.num_recompute_preemptions == 0


def test_blocks_are_needed_evenly() -> None:
    """One in sixteen sequences at every step, not all of them every sixteenth step."""
    core = bench.steady_core(bench.Load(running=32, queued=0, context=20, executors=1), 40)
    needed = []
    for _ in range(32):
        plan = core.plan(1.0)
        needed.append(len(plan.append_rows))
        core.apply(bench._result(core))
    assert needed == [2] * 32


def test_more_executors_are_as_many_cores(capsys) -> None:
    """Their steps are all counted."""
    flags = ["--running", "2", "--context", "8", "--steps", "5", "--executors", "3"]
    assert json.loads(_run(capsys, *flags, "--json", "-"))["steps"] == 15


@pytest.mark.parametrize("flags", [["--running", "0"], ["--queued", "-1"], ["--steps", "x"]])
def test_senseless_loads_are_refused(flags: list[str]) -> None:
    """With the usage, and an exit status that is not 0."""
    with pytest.raises(SystemExit) as stopped:
        bench.main(flags)
    assert stopped.value.code == 2
