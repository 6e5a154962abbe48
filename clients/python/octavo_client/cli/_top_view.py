"""What `octavo top` shows: a head, and for each executor its pool, its steps, its sequences."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from octavo_client._rates import Rates, RateWindow
from octavo_client.cli._words import duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from octavo_client import Executor, Pool, SequenceInfo, Snapshot, StepSample

PIPE_WIDTH = 130
_KEPT_STEPS = 256
_MIN_BAR, _MAX_BAR = 10, 60
_WORDS = 98  # characters beside a bar, at most
_ROWS_OF_A_PIPE = 20
_LINES_OF_HEAD, _LINES_OF_EXECUTOR = 5, 6
# Phase, its colour, its character where there are no colours.
_PHASES = (
    ("plan", "magenta", "p"),
    ("wire", "yellow", "w"),
    ("queue", "bright_black", "q"),
    ("prepare", "cyan", "P"),
    ("forward", "blue", "█"),
    ("sample", "green", "s"),
)
_STATES = {"running": "green", "preempted": "yellow", "swapped": "yellow", "waiting": "dim"}


@dataclass
class TopState:
    """What was seen last, and whether it is still being seen."""

    target: str
    interval: float
    snapshot: Snapshot | None = None
    rates: Rates | None = None
    trouble: str = ""
    retry_at: float = 0.0
    _window: RateWindow = field(default_factory=RateWindow)
    _steps: dict[str, deque[StepSample]] = field(default_factory=dict)

    def take(self, snapshot: Snapshot) -> None:
        """A snapshot came."""
        self.snapshot, self.trouble = snapshot, ""
        self.rates = self._window.add(snapshot)
        for executor in snapshot.executors:
            kept = self._steps.setdefault(executor.address, deque(maxlen=_KEPT_STEPS))
            kept.extend(executor.steps)
        for address in self._steps.keys() - {each.address for each in snapshot.executors}:
            del self._steps[address]

    def lose(self, trouble: str, retry_at: float) -> None:
        """The connection is lost; the next try is at `retry_at`, in monotonic seconds."""
        self.trouble, self.retry_at = trouble, retry_at

    def steps(self, address: str) -> Sequence[StepSample]:
        """The latest steps of an executor."""
        return self._steps.get(address, ())


def render(state: TopState, width: int, height: int | None) -> RenderableType:
    """Draw a frame.

    Args:
        state: what was seen.
        width: in characters.
        height: in lines, of which the sequences get what is left; None: a pipe.
    """
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_title(state)]
    if state.snapshot is None:
        return Group(*parts)
    parts += [_speeds(state), _counts(state), Text()]
    executors = state.snapshot.executors
    if not executors:
        parts.append(Text("no executor: this scheduler stands by, or waits for one", "yellow"))
    rows = _ROWS_OF_A_PIPE
    if height is not None and executors:
        rows = max(1, (height - _LINES_OF_HEAD) // len(executors) - _LINES_OF_EXECUTOR)
    for executor in executors:
        parts += _executor(executor, state.steps(executor.address), width, rows)
    return Group(*parts)


def _title(state: TopState) -> Text:
    from rich.text import Text

    name = state.snapshot.scheduler_id if state.snapshot else "…"
    text = Text.assemble(("octavo top", "bold"), f" · {name} · {state.target} · ")
    if state.trouble:
        seconds = max(0.0, state.retry_at - time.monotonic())
        text.append(f"{state.trouble}; trying again in {seconds:.0f} s", "bold red")
    elif state.snapshot is None:
        text.append("connecting", "yellow")
    else:
        text.append(f"every {state.interval:g} s", "green")
    return text


def _speeds(state: TopState) -> Text:
    assert state.snapshot is not None
    latency, rates = state.snapshot.latency, state.rates
    return _line(
        ("tokens/s", f"{rates.generated_tokens:,.1f}" if rates else "…"),
        ("prompt tokens/s", f"{rates.prompt_tokens:,.0f}" if rates else "…"),
        ("TTFT", _percentiles(latency.num_first_tokens, latency.ttft_p50_seconds,
                              latency.ttft_p99_seconds)),
        ("ITL", _percentiles(latency.num_later_tokens, latency.itl_p50_seconds,
                             latency.itl_p99_seconds)),
    )  # fmt: skip


def _percentiles(number: int, p50: float, p99: float) -> str:
    return f"{duration(p50)} (p99 {duration(p99)})" if number else "-"


def _counts(state: TopState) -> Text:
    assert state.snapshot is not None
    executors, rates = state.snapshot.executors, state.rates
    hits = rates.prefix_hit_rate if rates else None
    return _line(
        ("queued", f"{sum(each.num_queued for each in executors):,}"),
        ("running", f"{sum(each.num_running for each in executors):,}"),
        ("preempted", f"{sum(each.num_preempted for each in executors):,}"),
        ("preemptions/s", f"{rates.preemptions:.1f}" if rates else "…"),
        ("CoW/s", f"{rates.copied_blocks:.1f}" if rates else "…"),
        ("prefix hits", f"{hits:.0%}" if hits is not None else "-"),
        ("finished/s", f"{rates.finished:.1f}" if rates else "…"),
    )


def _one_line() -> Text:
    """Give a text that is cut where the screen ends, so that lines stay where they are."""
    from rich.text import Text

    return Text(no_wrap=True, overflow="ellipsis")


def _line(*pairs: tuple[str, str]) -> Text:
    text = _one_line()
    for number, (name, value) in enumerate(pairs):
        text.append("   " if number else "")
        text.append(f"{name} ", "dim")
        text.append(value, "bold")
    return text


def _executor(
    executor: Executor, steps: Sequence[StepSample], width: int, rows: int
) -> list[RenderableType]:
    from rich.text import Text

    head = Text(executor.address, "bold cyan")
    if not executor.connected:
        return [head.append(" not connected", "red"), Text()]
    if executor.draining:
        head.append(" draining", "yellow")
    head.append(f" · step {executor.step_id:,} · {executor.load_tokens:,} tokens of load", "dim")
    parts: list[RenderableType] = [head, _pool_bar(executor.pool, width)]
    parts.append(_steps_bar(steps, width))
    if executor.sequences:
        parts.append(_sequences(executor.sequences, rows))
    return [*parts, Text()]


def _pool_bar(pool: Pool, width: int) -> Text:
    own = max(0, pool.num_referenced - pool.num_shared - pool.num_fenced)
    parts = (
        (pool.num_shared, "█", "bright_white"),
        (own, "█", "blue"),
        (pool.num_fenced, "▒", "red"),
        (pool.num_cached, "▓", "bright_black"),
        (pool.num_free, "░", "bright_black"),
    )
    text = _bar("blocks", parts, max(_MIN_BAR, min(_MAX_BAR, width - _WORDS)))
    text.append(
        f" {pool.num_referenced:,} referenced ({pool.num_shared:,} shared, {pool.num_fenced:,} "
        f"fenced) · {pool.num_cached:,} cached · {pool.num_free:,} free"
    )
    if pool.num_host_total:
        used = pool.num_host_total - pool.num_host_free
        text.append(f" · host {used:,} of {pool.num_host_total:,}", "dim")
    return text


def _steps_bar(steps: Sequence[StepSample], width: int) -> Text:
    from rich.text import Text

    if not steps:
        return Text("steps  none yet", "dim")
    medians = {
        phase: median(getattr(step, f"{phase}_ns") for step in steps) / 1e9
        for phase, _, _ in _PHASES
    }
    parts = tuple((medians[phase], letter, colour) for phase, colour, letter in _PHASES)
    text = _bar("steps ", parts, max(_MIN_BAR, min(_MAX_BAR, width - _WORDS)))
    for phase, colour, _ in _PHASES:
        text.append(f" {phase} ", colour)
        text.append(duration(medians[phase]), "bold")
    return text


def _bar(name: str, parts: Sequence[tuple[float, str, str]], num_characters: int) -> Text:
    """Draw shares of a whole; what is there at all gets a character, if there is room."""
    text = _one_line()
    text.append(f"{name} ", "dim")
    total = sum(size for size, _, _ in parts) or 1.0
    done, drawn = 0.0, 0
    for size, letter, style in parts:
        done += size
        end = round(num_characters * done / total)
        if size and end == drawn and drawn < num_characters:
            end += 1
        text.append(letter * (end - drawn), style)
        drawn = max(drawn, end)
    return text


def _sequences(sequences: Sequence[SequenceInfo], rows: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("request", overflow="ellipsis", no_wrap=True, ratio=1)
    for name in ("#", "state"):
        table.add_column(name)
    for name in ("tokens", "prompt", "blocks", "prio"):
        table.add_column(name, justify="right")
    table.add_column("tenant", overflow="ellipsis", no_wrap=True, max_width=16)
    shown = sequences if len(sequences) <= rows else sequences[: max(rows - 1, 1)]
    for each in shown:
        table.add_row(
            Text(each.request_id),
            str(each.sample_index),
            Text(each.status, _STATES.get(each.status, "")),
            f"{each.num_tokens:,}",
            f"{each.num_prompt_tokens:,}",
            f"{len(each.block_table):,}",
            str(each.priority),
            Text(each.tenant or "-"),
        )
    if len(shown) < len(sequences):
        table.add_row(Text(f"and {len(sequences) - len(shown):,} more", "dim"))
    return table
