"""Step times of a measured machine, as a linear form whose coefficients were fitted.

    seconds = fixed + per_token * tokens + per_sequence * sequences that draw
            + per_decode_context * tokens attended to by decodes
            + per_prefill_context * query-key pairs of prefills
            + per_moved_block * swapped blocks + per_copied_block * copied blocks

Where matrices of few rows take longer per row than others, `token_curve` replaces
`per_token * tokens` by points to interpolate between. A calibration is data, a JSON file:

    {"name": "...", "num_blocks": 767, "block_size": 16, "num_host_blocks": 0,
     "max_num_seqs": 64, "max_num_batched_tokens": 512,
     "seconds": {"fixed": 0.004, "per_token": 0.0004, ...},
     "token_curve": [[1, 0.009], [64, 0.03], [512, 0.21]]}
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from scheduler_svc.simulator.work import StepSeconds, StepWork, num_pairs

_SIZES = {
    "num_blocks": None,
    "block_size": 16,
    "num_host_blocks": 0,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 512,
}


class CalibrationError(ValueError):
    """A calibration cannot be used; the message names the field and the bound."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Fitted step times, and the sizes of the executor that was measured.

    Attributes:
        name: of the machine, for reports.
        coefficients: seconds per unit of each of `TERMS`; a missing one is 0.
        token_curve: (tokens, seconds) by ascending tokens, instead of per_token; beyond its
            ends it goes on as its first and last pieces do, but never below 0.
        num_blocks: of the device pool.
        block_size: tokens per block.
        num_host_blocks: of the host pool.
        max_num_seqs: rows.
        max_num_batched_tokens: token budget of a step.
    """

    TERMS: ClassVar[tuple[str, ...]] = (
        "fixed",
        "per_token",
        "per_sequence",
        "per_decode_context",
        "per_prefill_context",
        "per_moved_block",
        "per_copied_block",
    )

    name: str
    coefficients: Mapping[str, float]
    num_blocks: int
    token_curve: tuple[tuple[float, float], ...] = ()
    block_size: int = 16
    num_host_blocks: int = 0
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    _values: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Refuse what could not be a time."""
        for name, value in self.coefficients.items():
            if name not in self.TERMS:
                raise CalibrationError(f"seconds.{name} is unknown; there are {self.TERMS}")
            if not 0 <= value < math.inf:
                raise CalibrationError(f"seconds.{name} must be from 0 and finite, got {value}")
        curve = self.token_curve
        if curve and len(curve) < 2:
            raise CalibrationError("token_curve must have at least 2 points")
        if any(a[0] >= b[0] for a, b in pairwise(curve)):
            raise CalibrationError("token_curve must ascend in tokens")
        if any(not 0 <= seconds < math.inf for _, seconds in curve):
            raise CalibrationError("token_curve: seconds must be from 0 and finite")
        values = [self.coefficients.get(name, 0.0) for name in self.TERMS]
        if curve:
            values[1] = 0.0
        object.__setattr__(self, "_values", tuple(values))

    @classmethod
    def load(cls, path: Path) -> LinearCost:
        """Read a calibration file.

        Raises:  CalibrationError: naming the file, and the field that is missing or wrong.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CalibrationError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise CalibrationError(f"{path}: not valid JSON: {error}") from error
        try:
            return cls._parse(data)
        except CalibrationError as error:
            raise CalibrationError(f"{path}: {error}") from error

    @classmethod
    def _parse(cls, data: Any) -> LinearCost:
        if not isinstance(data, dict) or not isinstance(data.get("seconds"), dict):
            raise CalibrationError("must be an object with an object 'seconds'")
        sizes: dict[str, int] = {}
        for name, default in _SIZES.items():
            value = data.get(name, default)
            low = 0 if name == "num_host_blocks" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise CalibrationError(f"{name} must be a whole number from {low}, got {value}")
            sizes[name] = value
        try:
            coefficients = {str(name): float(v) for name, v in data["seconds"].items()}
            curve = tuple((float(x), float(y)) for x, y in data.get("token_curve") or ())
        except (TypeError, ValueError) as error:
            raise CalibrationError(f"seconds and token_curve must hold numbers: {error}") from error
        return cls(str(data.get("name", "measured")), coefficients, token_curve=curve, **sizes)

    @staticmethod
    def terms(work: StepWork) -> tuple[float, ...]:
        """What the coefficients of `TERMS` are multiplied by; for fitting them."""
        prefills = work.prefills or []
        return (
            1.0,
            work.num_decodes + sum(count for _, count in prefills),
            work.num_sampled,
            work.decode_context,
            num_pairs(prefills),
            work.num_swapped_blocks,
            work.num_copied_blocks,
        )

    def seconds(self, work: StepWork) -> StepSeconds:
        """Say how long a step takes."""
        terms = self.terms(work)
        total = sum(a * b for a, b in zip(self._values, terms, strict=True))
        if self.token_curve and terms[1]:
            total += self._on_curve(terms[1])
        return StepSeconds(total, self._values[5] * work.num_swapped_blocks)

    def _on_curve(self, num_tokens: float) -> float:
        curve = self.token_curve
        right = min(max(1, bisect_left(curve, (num_tokens, 0.0))), len(curve) - 1)
        (x0, y0), (x1, y1) = curve[right - 1], curve[right]
        return max(0.0, y0 + (y1 - y0) * (num_tokens - x0) / (x1 - x0))
