"""`octavo top`: what a scheduler does right now."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from octavo_client.cli._options import connection_options, target_option

if TYPE_CHECKING:
    from octavo_client import AsyncClient, OctavoError, Snapshot
    from octavo_client.cli._top_view import TopState

_SILENCE_SECONDS = 15.0  # more than the interval, and the scheduler counts as silent
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.5, 10.0
_REFRESHES_PER_SECOND = 4


@click.command()
@target_option
@connection_options
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1, max=60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time from one look to the next.",
)
@click.option(
    "--once",
    is_flag=True,
    help="Print one frame, with the rates of one interval, and end; so it is without a terminal.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each look instead.")
def top(
    *, target: str, connection: dict[str, Any], interval: float, once: bool, as_json: bool
) -> None:
    """Show streams, the KV pool, the queue and the steps of a scheduler, live.

    Ctrl-C ends it. A connection that is lost is made again. Where there are API keys it takes
    an administrator's.
    """
    import contextlib

    from octavo_client.cli._top_view import TopState

    state = TopState(target=target, interval=interval)
    # Looking is all it does, so to stop looking is no failure.
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_top(state, connection, once=once, as_json=as_json))


async def _top(state: TopState, connection: dict[str, Any], *, once: bool, as_json: bool) -> None:
    from octavo_client import NO_RETRIES, AsyncClient

    async with AsyncClient(state.target, retry=NO_RETRIES, **connection) as client:
        if as_json:
            await _follow(client, state, lambda: _print_json(state, once=once), once=once)
        elif once or not sys.stdout.isatty():
            await _follow(client, state, lambda: None, once=True)
            _print_frame(state)
        else:
            await _show_live(client, state)


async def _show_live(client: AsyncClient, state: TopState) -> None:
    from rich.console import Console
    from rich.live import Live

    from octavo_client.cli._top_view import render

    console = Console()
    live = Live(
        get_renderable=lambda: render(state, console.width, console.height),
        console=console,
        screen=True,
        refresh_per_second=_REFRESHES_PER_SECOND,
    )
    with live:
        await _follow(client, state, live.refresh, once=False)


def _print_frame(state: TopState) -> None:
    from rich.console import Console

    from octavo_client.cli._top_view import PIPE_WIDTH, render

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    console = Console(width=width, highlight=False)
    console.print(render(state, console.width, None))


def _print_json(state: TopState, *, once: bool) -> None:
    if once and state.rates is None:  # the first of two
        return
    assert state.snapshot is not None
    snapshot = asdict(state.snapshot)
    for executor in snapshot["executors"]:
        del executor["blocks"]  # not asked for
    rates = None if state.rates is None else asdict(state.rates)
    click.echo(json.dumps({**snapshot, "rates": rates}))
    sys.stdout.flush()


async def _follow(
    client: AsyncClient, state: TopState, show: Callable[[], None], *, once: bool
) -> None:
    """Take snapshots in, and go on when the connection breaks; `once`: until there are rates.

    Raises:
        OctavoError: if the first connection fails, or for what no waiting helps.
    """
    from octavo_client import OctavoError, Unavailable

    num_failures = 0
    while True:
        try:
            async for snapshot in _snapshots(client, state.interval):
                num_failures = 0
                state.take(snapshot)
                show()
                if once and state.rates is not None:
                    return
            error: OctavoError = Unavailable("the scheduler has ended the watch")
        except OctavoError as failure:
            error = failure
        if once or state.snapshot is None or not _may_pass(error):
            raise error
        wait = min(_FIRST_WAIT_SECONDS * 2.0**num_failures, _LONGEST_WAIT_SECONDS)
        num_failures += 1
        state.lose(str(error), time.monotonic() + wait)
        if not sys.stdout.isatty():
            click.echo(f"octavo: {error}; trying again", err=True)
        await asyncio.sleep(wait)


def _may_pass(error: OctavoError) -> bool:
    from octavo_client import InvalidArgument, PermissionDenied, TlsFailed, Unauthenticated

    return not isinstance(error, InvalidArgument | PermissionDenied | TlsFailed | Unauthenticated)


async def _snapshots(client: AsyncClient, interval: float) -> AsyncIterator[Snapshot]:
    """Yield snapshots, each within a deadline.

    Raises:
        OctavoError: what broke the watch; DeadlineExceeded if nothing came.
    """
    from octavo_client import DeadlineExceeded

    seconds = interval + _SILENCE_SECONDS
    async with aclosing(client.watch(interval=interval, sequences=True)) as watch:
        while True:
            try:
                async with asyncio.timeout(seconds):
                    snapshot = await anext(watch, None)
            except TimeoutError:
                raise DeadlineExceeded(f"nothing came for {seconds:g} s") from None
            if snapshot is None:
                return
            yield snapshot
