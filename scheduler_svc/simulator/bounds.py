"""Values of the flags of `octavo simulate`, and between which bounds they must be.

Raises of all:  argparse.ArgumentTypeError: with the bounds.
"""

from __future__ import annotations

import argparse
import contextlib

_MOST = {"executors": 100_000, "blocks": 10_000_000, "requests": 100_000_000, "samples": 1024}
_MOST_SECONDS = 1e8


def integer(text: str, low: int, high: int) -> int:
    """A whole number from `low` to `high`."""
    with contextlib.suppress(ValueError):
        if low <= int(text) <= high:
            return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number from {low} to {high}, got {text!r}")


def number(text: str, low: float, high: float) -> float:
    """A number from `low` to `high`."""
    with contextlib.suppress(ValueError):
        if low <= float(text) <= high:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number from {low:g} to {high:g}, got {text!r}")


def whole(text: str) -> int:
    """A whole number, also 0."""
    return integer(text, 0, 2**31)


def count(text: str) -> int:
    """A whole number, at least 1."""
    return integer(text, 1, 2**31)


def executors(text: str) -> int:
    """How many executors or schedulers."""
    return integer(text, 1, _MOST["executors"])


def blocks(text: str) -> int:
    """Blocks of a pool."""
    return integer(text, 1, _MOST["blocks"])


def host_blocks(text: str) -> int:
    """Blocks of the host pool."""
    return integer(text, 0, _MOST["blocks"])


def requests_at_most(text: str) -> int:
    """How many requests."""
    return integer(text, 1, _MOST["requests"])


def samples(text: str) -> int:
    """Samples of one request."""
    return integer(text, 1, _MOST["samples"])


def seconds(text: str) -> float:
    """A span of simulated time."""
    return number(text, 1e-3, _MOST_SECONDS)


def per_second(text: str) -> float:
    """A rate, or a factor on one."""
    return number(text, 1e-6, 1e6)


def rate(text: str) -> float:
    """Failures an hour."""
    return number(text, 0, 3600)


def share(text: str) -> float:
    """A share of the whole."""
    return number(text, 1e-3, 1)


def failure(text: str) -> tuple[float, int]:
    """SECONDS:EXECUTOR."""
    when, colon, index = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"must be SECONDS:EXECUTOR, got {text!r}")
    return number(when, 0, _MOST_SECONDS), whole(index)


def span(text: str) -> tuple[int, int]:
    """MIN:MAX executors."""
    low, colon, high = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"must be MIN:MAX, got {text!r}")
    return executors(low), executors(high)
