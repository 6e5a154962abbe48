"""Tests of `octavo top` over a scripted scheduler."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from typing import Any

import grpc
import pytest
from octavo_client._admin import parse_snapshot
from octavo_client.cli import main
from octavo_client.cli._top_view import TopState, render
from rich.console import Console

OCTAVO = [sys.executable, "-P", "-m", "octavo_client"]


@pytest.fixture
def busy(fake: Any) -> Any:
    """A scheduler with one executor at work; its clock stands still, but for what tests do."""
    fill(fake)
    return fake


def fill(fake: Any, *, num_sequences: int = 2) -> None:
    executor = fake.snapshot.executors.add(address="10.0.0.9:50061", connected=True, step_id=1234)
    fake.snapshot.scheduler_id = "sched-a"
    fake.snapshot.time_unix_ns = 1_700_000_000_000_000_000
    latency = fake.snapshot.latency
    latency.num_first_tokens, latency.ttft_p50_seconds, latency.ttft_p99_seconds = 4, 0.041, 0.09
    pool = executor.pool
    pool.num_total, pool.num_referenced, pool.num_shared = 400, 212, 40
    pool.num_cached, pool.num_free, pool.num_fenced = 88, 100, 2
    executor.num_queued, executor.num_running, executor.num_preempted = 3, 2, 1
    for index in range(num_sequences):
        executor.sequences.add(
            request_id=f"req-{index}",
            status="running",
            num_tokens=1200 + index,
            tenant="team-a",
            block_table=[1, 2, 3],
        )
    executor.steps.add(step_id=1234, forward_ns=9_800_000, plan_ns=100_000)


def drawn(state: TopState, *, width: int = 130, height: int | None = None) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(render(state, width, height))
    return captured.get()


def state_of(fake: Any) -> TopState:
    """What `top` knows after two looks, a second apart, in which things happened."""
    state = TopState(target="here", interval=1)
    state.take(parse_snapshot(fake.snapshot))
    counters = fake.snapshot.executors[0].counters
    counters.num_generated_tokens, counters.num_copied_blocks = 128, 3
    counters.num_prefix_query_tokens, counters.num_prefix_hit_tokens = 100, 43
    counters.num_recompute_preemptions = 2
    fake.snapshot.time_unix_ns += 1_000_000_000
    state.take(parse_snapshot(fake.snapshot))
    return state


def test_a_frame_says_what_an_operator_asks(busy: Any) -> None:
    """Speed, queue, preemptions, copies, hits, pool, phases, streams."""
    text = drawn(state_of(busy))
    for said in (
        "sched-a", "tokens/s 128.0", "TTFT 41.0 ms (p99 90.0 ms)", "queued 3", "running 2",
        "preempted 1", "preemptions/s 2.0", "CoW/s 3.0", "prefix hits 43%", "10.0.0.9:50061",
        "212 referenced (40 shared, 2 fenced)", "88 cached", "100 free", "forward 9.8 ms",
        "plan 100 µs", "req-0", "req-1", "1,200", "team-a",
    ):  # fmt: skip
        assert said in text, f"{said!r} is not in\n{text}"


def test_bars_have_the_shares(busy: Any) -> None:
    """Half the pool is half the bar, and what is there at all is seen."""
    bar = next(line for line in drawn(state_of(busy)).splitlines() if "blocks" in line)
    assert 0.4 < bar.count("█") / (bar.count("█") + bar.count("▓") + bar.count("░")) < 0.65
    assert bar.count("▒") == 1  # 2 of 400


def test_long_lists_are_cut_to_the_screen(fake: Any) -> None:
    """The last line says how many more there are; nothing is longer than the screen."""
    fill(fake, num_sequences=200)
    lines = drawn(state_of(fake), width=80, height=30).rstrip("\n").splitlines()
    assert len(lines) <= 30
    assert "more" in lines[-1] or "more" in lines[-2]
    assert max(map(len, lines)) <= 80


def test_a_scheduler_without_executors_says_so(fake: Any) -> None:
    """As does an executor that is not connected."""
    state = TopState(target="here", interval=1)
    state.take(parse_snapshot(fake.snapshot))
    assert "no executor" in drawn(state)
    fake.snapshot.executors.add(address="e:1")
    state.take(parse_snapshot(fake.snapshot))
    assert "e:1 not connected" in drawn(state)


def test_names_are_no_markup(fake: Any) -> None:
    """A request_id that callers chose cannot restyle the screen or break it."""
    fill(fake, num_sequences=0)
    executor = fake.snapshot.executors[0]
    executor.sequences.add(request_id="[bold]x[/nonsense]", tenant="[red]", status="[/]")
    text = drawn(state_of(fake))
    assert "[bold]x[/nonsense]" in text
    assert "[red]" in text


@pytest.fixture
def ticking(busy: Any) -> Any:
    """Each look finds 50 tokens more, half a second later."""

    def tick() -> None:
        busy.snapshot.time_unix_ns += 500_000_000
        busy.snapshot.executors[0].counters.num_generated_tokens += 50

    busy.before_snapshot = tick
    return busy


def test_once_prints_a_frame_with_rates(ticking: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """So it does into a pipe without being asked: there is nothing to redraw."""
    for flags in (("--once",), ()):
        code = main(["top", "--target", ticking.target, "--interval", "0.1", *flags])
        captured = capsys.readouterr()
        assert (code, captured.err) == (0, "")
        assert "tokens/s 100.0" in captured.out
        assert "\x1b" not in captured.out


def test_json_has_snapshot_and_rates(ticking: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One object on one line, blocks left out."""
    code = main(["top", "--target", ticking.target, "--interval", "0.1", "--once", "--json"])
    out = capsys.readouterr().out
    assert code == 0
    assert out.count("\n") == 1
    told = json.loads(out)
    assert told["rates"]["generated_tokens"] == pytest.approx(100)
    (executor,) = told["executors"]
    assert executor["pool"]["num_referenced"] == 212
    assert executor["sequences"][0]["request_id"] == "req-0"
    assert executor["steps"][-1]["step_id"] == 1234
    assert "blocks" not in executor


def test_nothing_at_the_target_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """At the start a wrong target is told, not tried for ever."""
    code = main(["top", "--target", "127.0.0.1:1", "--once"])
    err = capsys.readouterr().err
    assert code == 1
    assert err.count("\n") == 1
    assert "127.0.0.1:1" in err


def test_a_key_that_is_no_administrators_is_told(
    busy: Any, wire: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """No waiting helps, so it ends."""
    busy.watch_failures = [wire.Failure(grpc.StatusCode.PERMISSION_DENIED, "an admin's key")]
    code = main(["top", "--target", busy.target])
    assert (code, capsys.readouterr().err) == (1, "octavo: an admin's key\n")


def test_it_connects_again(ticking: Any, wire: Any) -> None:
    """A stream of JSON goes on after the scheduler went away, and says so on stderr."""
    ticking.watch_failures = [wire.Failure(grpc.StatusCode.UNAVAILABLE, "away", after_deltas=2)]
    command = [*OCTAVO, "top", "--target", ticking.target, "--interval", "0.1", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [json.loads(process.stdout.readline()) for _ in range(6)]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert err == "octavo: away; trying again\n"
    times = [line["time_unix_ns"] for line in lines]
    assert times == sorted(set(times))
    assert len(ticking.watch_authorizations) == 2


def test_on_a_terminal_ctrl_c_ends_it_with_0(ticking: Any) -> None:
    """The screen shows frames until then, and is given back as it was."""
    main_end, other_end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    process = subprocess.Popen(
        [*OCTAVO, "top", "--target", ticking.target, "--interval", "0.1"],
        stdin=other_end, stdout=other_end, stderr=other_end, env=environment, close_fds=True,
    )  # fmt: skip
    os.close(other_end)
    try:
        shown = _read_until(main_end, b"req-1")
        process.send_signal(signal.SIGINT)
        shown += _read_until(main_end, b"\x1b[?1049l")  # the other screen is left
        assert process.wait(20) == 0
    finally:
        process.kill()
        os.close(main_end)
    assert b"\x1b[?1049h" in shown
    assert b"Traceback" not in shown


def _read_until(descriptor: int, wanted: bytes, seconds: float = 30) -> bytes:
    shown, end = b"", time.monotonic() + seconds
    while wanted not in shown:
        assert time.monotonic() < end, shown
        if select.select([descriptor], [], [], 0.2)[0]:
            shown += os.read(descriptor, 65536)
    return shown
