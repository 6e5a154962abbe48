"""Tests of scheduler_svc.api.bounds."""

from __future__ import annotations

import math

import pytest

from scheduler_svc.api import bounds
from scheduler_svc.errors import InvalidArgument


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.5, 1.5])
def test_numbers_outside_are_refused(value: float) -> None:
    """Infinities and NaN are outside every bound."""
    with pytest.raises(InvalidArgument, match="x must be between 0 and 1, got"):
        bounds.number("x", value, 0, 1)


def test_an_open_low_end_is_refused() -> None:
    """`above` leaves the end itself out, and the message says so."""
    assert bounds.number("x", 0, 0, 1) == 0
    with pytest.raises(InvalidArgument, match="x must be above 0, to 1, got 0"):
        bounds.number("x", 0, 0, 1, above=True)


def test_the_first_bad_token_id_is_named() -> None:
    """With its place and the vocabulary's size."""
    assert bounds.token_ids("ids", iter([0, 9]), 10) == [0, 9]
    with pytest.raises(InvalidArgument, match=r"ids\[1\] must be below .* 10, got 12"):
        bounds.token_ids("ids", [0, 12, 99], 10)


def test_long_values_are_not_echoed_whole() -> None:
    """An error never carries a client's kilobytes back."""
    assert len(bounds.shown("x" * 5000)) < 100
