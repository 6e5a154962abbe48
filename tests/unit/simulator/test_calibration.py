"""Measured step times: read from a file, refused by field, and linear."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scheduler_svc.simulator import CalibrationError, LinearCost, StepWork

WORK = StepWork(3, 300, [(0, 10), (10, 4)], 4, 2, 1)


def test_terms_count_the_work() -> None:
    """3 + 14 tokens; pairs are 10 * 5.5 + 4 * 12.5."""
    assert LinearCost.terms(WORK) == (1.0, 17, 4, 300, 105.0, 2, 1)


def test_seconds_are_the_terms_times_the_coefficients() -> None:
    """Each coefficient alone gives its own term."""
    for name, term in zip(LinearCost.TERMS, LinearCost.terms(WORK), strict=True):
        cost = LinearCost("x", {name: 0.5}, num_blocks=1)
        assert cost.seconds(WORK).forward == pytest.approx(0.5 * term)
    assert LinearCost("x", {"per_moved_block": 0.5}, num_blocks=1).seconds(WORK).move == 1.0


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 1.0), (5, 3.0), (9, 5.0), (19, 6.0), (29, 7.0)]
)
def test_a_curve_takes_the_place_of_the_price_per_token(num_tokens: int, expected: float) -> None:
    """Between its points, and on beyond the last, it is a line."""
    curve = ((1.0, 1.0), (9.0, 5.0), (19.0, 6.0))
    cost = LinearCost("x", {"per_token": 100.0}, num_blocks=1, token_curve=curve)
    assert cost.seconds(StepWork(num_tokens)).forward == pytest.approx(expected)


def test_a_file_is_read(tmp_path: Path) -> None:
    """Sizes that are left out are the defaults."""
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"num_blocks": 700, "seconds": {"fixed": 0.01}}))
    cost = LinearCost.load(path)
    assert (cost.num_blocks, cost.block_size) == (700, 16)
    assert cost.seconds(StepWork()).forward == 0.01


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "object 'seconds'"),
        ({"seconds": {}}, "num_blocks must be a whole number from 1, got None"),
        ({"seconds": {"fixed": -1}, "num_blocks": 1}, "seconds.fixed must be from 0"),
        ({"seconds": {"flops": 1}, "num_blocks": 1}, "seconds.flops is unknown"),
        ({"seconds": {"fixed": "x"}, "num_blocks": 1}, "must hold numbers"),
        ({"seconds": {}, "num_blocks": 1, "token_curve": [[1, 2]]}, "at least 2 points"),
        ({"seconds": {}, "num_blocks": 1, "token_curve": [[2, 1], [1, 2]]}, "must ascend"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, data: object, message: str) -> None:
    """One line with the file, the field and the bound."""
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(data))
    with pytest.raises(CalibrationError, match=message) as caught:
        LinearCost.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """It says so, with its name."""
    with pytest.raises(CalibrationError, match=r"none.json: No such file"):
        LinearCost.load(tmp_path / "none.json")
