"""Words that several sub-commands share: counts, notices, hints."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from octavo_client import GenerateParams, OctavoError


def counted(number: int, noun: str) -> str:
    """Return "1 token", "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def notice_retry(error: OctavoError) -> None:
    """Say on stderr that the client goes on by itself; for `Client(on_retry=...)`.

    On a terminal it takes a line of its own, below the text that came so far.
    """
    from octavo_client import ConnectionFailed, Overloaded

    if isinstance(error, Overloaded) and error.reason == "TENANT_LIMIT":
        text = f"{error}, waiting…"
    elif isinstance(error, Overloaded):
        text = "the server is full, trying again…"
    elif isinstance(error, ConnectionFailed):
        text = "nothing answers yet, trying again…"
    else:
        text = "connection lost, resuming…"
    begin = "\n" if sys.stdout.isatty() and sys.stderr.isatty() else ""
    sys.stdout.flush()
    click.echo(begin + click.style(text, dim=True), err=True)


def drop_max_tokens(error: OctavoError, params: GenerateParams) -> bool:
    """Drop max_tokens if the error is that context or pool have fewer: "most" still holds.

    Returns: whether the request is worth sending again, without it.
    """
    from octavo_client import InvalidArgument, NeverFits

    is_bound = isinstance(error, InvalidArgument) and error.field == "stopping.max_tokens"
    if not is_bound and not isinstance(error, NeverFits):
        return False
    return params.pop("max_tokens", None) is not None


def hinted(error: OctavoError) -> str:
    """Return the error's message, and for a passed deadline which flags help."""
    from octavo_client import DeadlineExceeded

    hint = ": raise --timeout or lower --max-tokens" if isinstance(error, DeadlineExceeded) else ""
    return f"{error}{hint}"


def duration(seconds: float) -> str:
    """Return "950 µs", "41.3 ms", "1.84 s", "3 min 20 s"."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
