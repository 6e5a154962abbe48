"""Checks of single fields: each gives the value back or names the field and its bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from scheduler_svc.errors import InvalidArgument

MAX_TEXT_BYTES = 4 * 1024 * 1024
_SHOWN_CHARACTERS = 80


def between(field: str, value: int, low: int, high: int) -> int:
    """Check a whole number, both ends included.

    Raises:  InvalidArgument: if it is outside.
    """
    if not low <= value <= high:
        raise InvalidArgument(field, f"between {low} and {high}", value)
    return value


def at_most(field: str, value: int, high: int) -> int:
    """Check a whole number that is never negative.

    Raises:  InvalidArgument: if it is larger.
    """
    if value > high:
        raise InvalidArgument(field, f"at most {high}", value)
    return value


def number(field: str, value: float, low: float, high: float, *, above: bool = False) -> float:
    """Check a finite number; `above` leaves the low end out.

    Raises:  InvalidArgument: if it is outside, infinite or not a number.
    """
    is_low_enough = low < value if above else low <= value
    if not (math.isfinite(value) and is_low_enough and value <= high):
        bound = f"above {low:g}, to {high:g}" if above else f"between {low:g} and {high:g}"
        raise InvalidArgument(field, bound, f"{value:g}")
    return value


def short(field: str, value: str, max_characters: int) -> str:
    """Check a string's length in characters.

    Raises:  InvalidArgument: if it is longer.
    """
    if len(value) > max_characters:
        raise InvalidArgument(field, f"at most {max_characters} characters", len(value))
    return value


def text(field: str, value: str) -> str:
    """Check the length in bytes of a text that is to be tokenized.

    Raises:  InvalidArgument: if it is longer than any model's context.
    """
    num_bytes = len(value) if value.isascii() else len(value.encode())
    if num_bytes > MAX_TEXT_BYTES:
        raise InvalidArgument(field, f"at most {MAX_TEXT_BYTES} bytes", num_bytes)
    return value


def count(field: str, values: Sequence[object], high: int) -> None:
    """Check the number of entries of a repeated field.

    Raises:  InvalidArgument: if there are more.
    """
    if len(values) > high:
        raise InvalidArgument(field, f"at most {high} entries", len(values))


def token_ids(field: str, ids: Iterable[int], vocab_size: int) -> list[int]:
    """Check that ids belong to the vocabulary.

    Raises:  InvalidArgument: naming the first that does not.
    """
    checked = list(ids)
    if checked and max(checked) >= vocab_size:
        index = next(at for at, token_id in enumerate(checked) if token_id >= vocab_size)
        bound = f"below the vocabulary size of {vocab_size}"
        raise InvalidArgument(f"{field}[{index}]", bound, checked[index])
    return checked


def shown(value: str) -> str:
    """A client's string, fit to be shown to it in an error."""
    return repr(value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "…")
