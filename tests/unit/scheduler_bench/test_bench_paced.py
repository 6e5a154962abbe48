"""`octavo bench core --rate`: the pace is kept, and what was late is counted."""

from __future__ import annotations

import json

import pytest
from octavo.v1 import executor_pb2 as pb

from scheduler_svc import bench, bench_paced
from scheduler_svc.bench import Load
from scheduler_svc.bench_executors import Rows

SMALL = Load(running=4, queued=0, context=40, executors=3)


def test_who_draws_a_token() -> None:
    """Decode rows each, and a chunk that ends what is known; finished rows no more."""
    rows = Rows()
    start = pb.StepPlan(starts=[pb.RowStart(row=1, tokens=[5] * 10, num_computed_tokens=2)])
    start.chunk_rows.append(1)
    start.chunk_counts.append(5)
    assert rows.step(start) == 0
    assert rows.step(pb.StepPlan(chunk_rows=[1], chunk_counts=[3])) == 1
    enter = pb.StepPlan(starts=[pb.RowStart(row=2, tokens=[5])], decode_enter_rows=[1])
    enter.chunk_rows.append(2)
    enter.chunk_counts.append(1)
    assert rows.step(enter) == 2
    assert rows.step(pb.StepPlan(decode_enter_rows=[2])) == 2
    assert rows.step(pb.StepPlan(decode_leave_rows=[1])) == 1
    assert rows.step(pb.StepPlan(finish_rows=[2])) == 0


def test_cores_step_by_the_clock() -> None:
    """As many steps as fit the time, and not one more, on a machine that has the time."""
    pace = bench_paced.pace_cores(SMALL, rate=20.0, seconds=0.5)
    assert 0 < pace.steps <= 3 * 11
    assert pace.seconds >= 0.4
    assert 0 < pace.cpu_share <= 1.1
    assert pace.plan_apply_us is not None and pace.plan_apply_us.min > 0


def test_a_pace_that_cannot_be_kept_is_late() -> None:
    """10 µs are too few for any step: the time ends the run, and every step counts as late."""
    pace = bench_paced.pace_cores(SMALL, rate=1e5, seconds=0.05)
    assert pace.steps == pace.late_steps > 0


def test_every_sequence_of_the_engines_requests_has_the_same_length_in_the_end() -> None:
    """So that the engine, which balances by length, gives every executor the same number."""
    requests = bench_paced._requests(SMALL, max_tokens=100)
    assert len(requests) == 12
    assert {len(r.prompt_tokens) + r.max_tokens for r in requests} == {140}
    shared = {tuple(r.prompt_tokens[: bench.BLOCK_SIZE]) for r in requests}
    assert len(shared) == len(requests), "no two share a block"


def test_the_engine_drives_simulated_executors(capsys: pytest.CaptureFixture[str]) -> None:
    """Claimed over gRPC, filled, and kept at the pace; the JSON says how it went."""
    flags = "--running 3 --context 20 --executors 2 --rate 20 --seconds 0.5 --wire --readers"
    assert bench.main([*flags.split(), "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["running"], report["executors"], report["rate"]) == (3, 2, 20.0)
    assert report["wire"] and report["readers"]
    assert 0 < report["steps"] <= 2 * 20 * report["seconds"] + 2 * 2
    assert 0 <= report["late_steps"] <= report["steps"]
    assert report["cpu_share"] > 0 and report["executors_cpu_share"] > 0
    assert "plan_apply_us" not in report, "it is not measured there"


def test_the_table_shows_pace_and_share() -> None:
    """Steps per executor as they were, beside what was asked for."""
    pace = bench_paced.Pace(
        64, 1000, 2, 50.0, wire=True, readers=False, seconds=10.0, steps=900, late_steps=7,
        cpu_share=0.1234,
    )  # fmt: skip
    title, row = pace.table()
    assert len(title) == len(row)
    for text in ("45.00", "7 of 900", "12.34%"):
        assert text in row


@pytest.mark.parametrize(
    "flags", ["--wire", "--rate 0", "--rate 50 --readers", "--rate 50 --sweep", "--rate nan"]
)
def test_flags_that_mean_nothing_together_are_refused(flags: str) -> None:
    """With the usage, and an exit status that is not 0."""
    with pytest.raises(SystemExit) as stopped:
        bench.main(flags.split())
    assert stopped.value.code == 2
