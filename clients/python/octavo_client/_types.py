"""What the client hands out and takes in: plain frozen values, nothing of protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Health(StrEnum):
    """What a service says about itself (grpc.health.v1)."""

    SERVING = "serving"
    NOT_SERVING = "not_serving"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Beam:
    """Beam search instead of sampling.

    Attributes:
        width: beams kept at each step, 2 to 16.
        length_penalty: power of the length that divides a beam's score; None: 1.
        early_stopping: end as soon as `width` beams are finished.
    """

    width: int
    length_penalty: float | None = None
    early_stopping: bool = False


class GenerateParams(TypedDict, total=False):
    """How to generate; each may be left out, and then the service's default holds.

    The names, units and bounds are those of `octavo.v1.GenerateRequest`, flattened.
    """

    request_id: str
    model: str
    # Sampling.
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    # Stopping.
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    include_stop: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    # Several choices.
    n: int
    best_of: int
    beam: Beam
    # Output.
    omit_text: bool
    logprobs: int
    prompt_logprobs: int
    echo: bool
    keep_special_tokens: bool
    # Scheduling.
    priority: int
    tenant: str
    cache_disable: bool
    cache_salt: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities of one position: the token that stands there, the likeliest ones."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted. First event of a stream, once."""

    request_id: str
    model: str
    num_prompt_tokens: int
    seed: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """More of one choice. Texts of one choice concatenate to its final text."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    is_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """One choice ended.

    Attributes:
        stopped_by: the stop string or stop token id that matched; None: end of
            sequence, or no stop.
    """

    index: int
    reason: FinishReason
    num_tokens: int
    stopped_by: str | int | None = None
    cumulative_logprob: float | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Sum over the request. Last event of a stream, once."""

    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    num_preemptions: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0


Event = Started | Delta | Finished | Usage


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole continuation; the prompt_* parts are there if echo or prompt_logprobs asked."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[PositionLogprobs, ...] = ()
    stopped_by: str | int | None = None
    cumulative_logprob: float | None = None
    error: str = ""
    prompt_text: str = ""
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    model: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids


@dataclass(frozen=True, slots=True)
class Model:
    """The model that is served."""

    model: str
    fingerprint: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    kv_capacity_tokens: int
    dtype: str
