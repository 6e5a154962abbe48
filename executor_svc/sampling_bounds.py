"""What a new row may ask of the sampler.

A scheduler checks its clients; the executor checks the scheduler, because a value out
of bounds could draw a token that does not exist, or none at all.
"""

from __future__ import annotations

import math

import numpy as np

from executor_svc.errors import InvalidPlan
from executor_svc.plan import RowStart

_MAX_LOGPROBS = 1000
_MAX_BEAM_CANDIDATES = 4096
# As the wire's float has it: it lies below the double of the same name.
_MIN_REPETITION_PENALTY = float(np.float32(0.01))
_MAX_REPETITION_PENALTY = 100


def check_sampling(start: RowStart, vocab_size: int) -> None:
    """Check the numbers of a row's sampling; NaN is within no bounds.

    Raises:
        InvalidPlan: if one is out of bounds.
    """
    sampling = start.sampling

    def require(name: str, value: float, within: bool, bounds: str) -> None:
        if not within:
            raise InvalidPlan(f"starts: row {start.row} has {name} {value}, not {bounds}")

    def require_finite(name: str, value: float) -> None:
        require(name, value, math.isfinite(value), "finite")

    temperature, top_p, min_p = sampling.temperature, sampling.top_p, sampling.min_p
    require("temperature", temperature, 0 <= temperature < math.inf, "finite and at least 0")
    require("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1")
    require("min_p", min_p, 0 <= min_p <= 1, "between 0 and 1")
    repetition = sampling.repetition_penalty
    require(
        "repetition_penalty",
        repetition,
        _MIN_REPETITION_PENALTY <= repetition <= _MAX_REPETITION_PENALTY,
        "between 0.01 and 100",
    )
    require_finite("presence_penalty", sampling.presence_penalty)
    require_finite("frequency_penalty", sampling.frequency_penalty)
    for token, bias in sampling.logit_bias.items():
        require_finite(f"logit_bias[{token}]", bias)
    for name, count, most in (
        ("num_logprobs", start.num_logprobs or 0, _MAX_LOGPROBS),
        ("num_prompt_logprobs", start.num_prompt_logprobs or 0, _MAX_LOGPROBS),
        ("num_beam_candidates", start.num_beam_candidates, min(vocab_size, _MAX_BEAM_CANDIDATES)),
    ):
        require(name, count, 0 <= count <= most, f"at most {most}")
