"""What `octavo demo` shows: panels on a terminal, lines elsewhere, a table at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from octavo_client.cli._words import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.layout import Layout
    from rich.text import Text

    from octavo_client import Pool

_BAR_CHARS = 40


@dataclass
class DemoStream:
    """One stream as it stands; times are monotonic seconds, 0 until known."""

    title: str
    texts: dict[int, str] = field(default_factory=dict)
    num_tokens: int = 0
    begin: float = 0.0
    first: float = 0.0
    end: float = 0.0
    reasons: list[str] = field(default_factory=list)
    error: str = ""

    def add(self, index: int, text: str, num_tokens: int) -> None:
        """More of one choice came."""
        if num_tokens and not self.first:
            self.first = time.monotonic()
        self.num_tokens += num_tokens
        self.texts[index] = self.texts.get(index, "") + text

    def finish(self, reason: str, error: str) -> None:
        """One choice ended."""
        self.reasons.append(str(reason))
        if error or reason in ("error", "cancelled"):
            self.error = error or f"ended with {reason}"

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.first - self.begin if self.first else None

    @property
    def reason(self) -> str:
        """Why it ended, each reason once."""
        return "failed" if self.error else ", ".join(sorted(set(self.reasons)))


@dataclass
class DemoState:
    """All streams, and the pool."""

    streams: list[DemoStream]
    pools: list[Pool] = field(default_factory=list)
    peak_blocks: int = 0
    begin: float = field(default_factory=time.monotonic)
    seconds: float = 0.0  # 0 while it runs

    @property
    def num_tokens(self) -> int:
        """Tokens of all streams."""
        return sum(stream.num_tokens for stream in self.streams)

    @property
    def num_blocks(self) -> int:
        """Blocks of all pools."""
        return sum(pool.num_total for pool in self.pools)

    @property
    def rate(self) -> float:
        """Tokens per second so far."""
        return self.num_tokens / max(self.seconds or time.monotonic() - self.begin, 1e-9)


class DemoView(Protocol):
    """Shows the state while it changes."""

    def ended(self, stream: DemoStream) -> None:
        """A stream ended."""


@contextlib.contextmanager
def demo_view(state: DemoState, console: Console) -> Iterator[DemoView]:
    """Show the state: live where the console is a terminal, else a line per ended stream."""
    if not console.is_terminal:
        yield _PlainView(console)
        return
    from rich.live import Live

    view = _LiveView(state, console)
    with Live(view, console=console, refresh_per_second=10, screen=True):
        yield view


def screen_svg(state: DemoState, *, width: int = 116, height: int = 40) -> str:
    """Return the live screen as an SVG picture; sizes in characters."""
    import io

    from rich.console import Console

    console = Console(
        record=True, width=width, height=height, file=io.StringIO(), force_terminal=True
    )
    console.print(_LiveView(state, console))
    return console.export_svg(title="make demo")


class _PlainView:
    def __init__(self, console: Console) -> None:
        self._console = console

    def ended(self, stream: DemoStream) -> None:
        text = stream.error or " ".join(stream.texts.get(0, "").split())
        ttft = f"{stream.ttft * 1000:.0f} ms" if stream.ttft is not None else "-"
        self._console.print(
            f"{stream.title}: {counted(stream.num_tokens, 'token')}, TTFT {ttft}, "
            f"{stream.reason}: {text}",
            markup=False,
            soft_wrap=True,
        )


class _LiveView:
    """A grid of panels with the tail of each text, and a bar of the pool."""

    def __init__(self, state: DemoState, console: Console) -> None:
        self._state = state
        self._console = console

    def ended(self, stream: DemoStream) -> None:
        """Nothing: the next refresh shows it."""

    def __rich__(self) -> Layout:
        from rich.layout import Layout

        rows = [self._state.streams[i : i + 2] for i in range(0, len(self._state.streams), 2)]
        height = max((self._console.height - 2) // len(rows) - 2, 1)
        width = max(self._console.width // 2 - 4, 10)
        grid = Layout()
        body, foot = Layout(ratio=1), Layout(size=2)
        body.split_column(*(Layout() for _ in rows))
        for layout, row in zip(body.children, rows, strict=True):
            layout.split_row(*(Layout(_panel(each, self._console, width, height)) for each in row))
        foot.update(_foot(self._state))
        grid.split_column(body, foot)
        return grid


def _panel(stream: DemoStream, console: Console, width: int, height: int) -> RenderableType:
    from rich.panel import Panel

    style = "red" if stream.error else "dim" if stream.end else "cyan"
    text = stream.error or "\n".join(stream.texts[index] for index in sorted(stream.texts))
    return Panel(
        _tail(text, console, width, height),
        title=stream.title,
        subtitle=" · ".join(filter(None, (counted(stream.num_tokens, "token"), stream.reason))),
        border_style=style,
    )


def _tail(text: str, console: Console, width: int, height: int) -> Text:
    """The last lines that fit, wrapped between words."""
    from rich.text import Text

    lines = Text(text).wrap(console, width)
    return Text("\n").join(lines[-height:])


def _foot(state: DemoState) -> Text:
    from rich.text import Text

    total = max(state.num_blocks, 1)
    used = sum(pool.num_referenced for pool in state.pools)
    cached = sum(pool.num_cached for pool in state.pools)
    num_used, num_cached = _BAR_CHARS * used // total, _BAR_CHARS * cached // total
    bar = Text("KV blocks ")
    bar.append("█" * num_used, "green")
    bar.append("█" * num_cached, "blue")
    bar.append("░" * (_BAR_CHARS - num_used - num_cached), "dim")
    bar.append(f" {used} in use, {cached} cached, of {state.num_blocks}; {state.rate:.1f} tokens/s")
    return bar


def print_table(state: DemoState, slot_use: float, console: Console) -> None:
    """Print what each stream took, and the sums.

    Args:
        state: at the end.
        slot_use: live slots divided by allocated ones, over all steps.
        console: where to.
    """
    from rich.table import Table

    table = Table()
    table.add_column("stream")
    for name in ("tokens", "TTFT ms", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("finish")
    for stream in state.streams:
        ttft = f"{stream.ttft * 1000:.0f}" if stream.ttft is not None else "-"
        seconds = f"{stream.end - stream.begin:.2f}"
        table.add_row(stream.title, str(stream.num_tokens), ttft, seconds, stream.reason)
    console.print(table)
    console.print(
        f"{counted(state.num_tokens, 'token')} in {state.seconds:.2f} s, "
        f"{state.rate:.1f} tokens/s; "
        f"KV slots that held a token: {slot_use:.1%} of those allocated; "
        f"peak {state.peak_blocks} of {state.num_blocks} blocks",
        soft_wrap=True,
    )
