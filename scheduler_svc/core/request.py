"""What goes into the scheduler core and what comes out: plain values.

A `Request` has been validated: every bound of inference.proto holds and every
default is filled in. The core trusts it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a choice ended; every choice ends with exactly one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a sequence's next token is drawn; bounds are those of types.proto."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search: width, length penalty (power of the length), early stopping."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One validated request.

    `stop_token_ids` already holds the model's end-of-sequence tokens unless they are
    ignored. `resumed` maps a sample index to output tokens the client already has.
    `arrival` and `deadline` are seconds on the clock that `Scheduler.plan` is given.
    `best_of` sequences run; choosing the best n of them is the caller's.
    """

    request_id: str
    prompt_tokens: list[int]
    sampling: SamplingParams
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    n: int = 1
    best_of: int = 1
    beam: BeamParams | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    use_cache: bool = True
    resumed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    arrival: float = 0.0
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token that stands at a position, and the likeliest ones there."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class SequenceOutput:
    """What one step (or several, coalesced) added to one choice.

    `finish` is set on the last output of a choice and never again. `stop_token_id`
    names the token that ended it; that token is the last of `tokens`.
    """

    sample_index: int
    tokens: list[int]
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    cumulative_logprob: float | None = None
    error: str = ""
