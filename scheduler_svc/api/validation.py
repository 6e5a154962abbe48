"""A GenerateRequest as it came, to one that the core may trust.

Every bound of inference.proto and types.proto is checked here, and every default filled
in. What needs no prompt is checked before the prompt is tokenized.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.v1 import inference_pb2, types_pb2

from scheduler_svc.api import bounds
from scheduler_svc.api.ports import ModelLimits
from scheduler_svc.core.request import BeamParams, Request, SamplingParams
from scheduler_svc.errors import InvalidArgument
from scheduler_svc.model_files import ModelFiles, SamplingDefaults
from scheduler_svc.text.assembler import TextOptions

MAX_CHOICES = 64
MAX_LOGPROBS = 20
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MAX_NAME_CHARACTERS = 128
_MAX_STOPS = 16
_MAX_STOP_BYTES = 1024
_MAX_STOP_TOKENS = 64
_MAX_BIASES = 1024
_MAX_ALLOWED = 4096
_MAX_BEAM_WIDTH = 16
_MAX_LENGTH_PENALTY = 10.0  # a length to a higher power leaves the floating-point range
_ROUNDING_TOKENS = 32  # two blocks of the default size, lost per sequence to whole blocks
_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class ServedLimits:
    """What model and executors allow together, and the model's defaults."""

    max_model_len: int
    vocab_size: int
    kv_capacity_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @classmethod
    def of(cls, model: ModelFiles, limits: ModelLimits, max_model_len_cap: int) -> ServedLimits:
        """Take the lowest of each limit; a cap of 0 is none."""
        lengths = [limits.max_model_len, model.max_model_len, max_model_len_cap]
        return cls(
            max_model_len=min(length for length in lengths if length),
            vocab_size=min(limits.vocab_size, model.vocab_size),
            kv_capacity_tokens=limits.kv_capacity_tokens,
            eos_token_ids=model.eos_token_ids,
            sampling=model.sampling,
        )


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What the stream carries besides text.

    Attributes:
        n: choices returned.
        num_sequences: choices generated.
        is_ranked: choices are only known at the end: best_of above n, or beam search.
        resumed: tokens that the client has of each choice that it names.
        stop_token_ids: those that the client named; the end of sequence is not told.
    """

    n: int = 1
    num_sequences: int = 1
    is_ranked: bool = False
    echo: bool = False
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    resumed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Validated:
    """A request that holds every bound."""

    request: Request
    text: TextOptions
    response: ResponseOptions

    @property
    def needs_model(self) -> bool:
        """Whether anything is to be computed."""
        return self.request.max_tokens > 0 or self.request.num_prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class Options:
    """All of a request but its prompt, within bounds."""

    request_id: str
    prompt_field: str
    sampling: SamplingParams
    max_tokens: int | None
    min_tokens: int
    stop_token_ids: frozenset[int]
    beam: BeamParams | None
    text: TextOptions
    response: ResponseOptions


def new_request_id() -> str:
    """Draw an id for a request whose client chose none."""
    return f"req-{secrets.token_hex(12)}"


def check_options(message: inference_pb2.GenerateRequest, limits: ServedLimits) -> Options:
    """Check everything that does not need the prompt's tokens.

    Raises:  InvalidArgument: naming the first field that is out of bounds.
    """
    prompt_field = message.WhichOneof("prompt")
    if prompt_field is None:
        raise InvalidArgument("prompt", "set: one of text, tokens, chat")
    _check_names(message)
    bounds.between("priority", message.priority, -100, 100)
    sampling = _sampling(message.sampling, limits)
    stopping = message.stopping
    bounds.count("stopping.stop_token_ids", stopping.stop_token_ids, _MAX_STOP_TOKENS)
    bounds.token_ids("stopping.stop_token_ids", stopping.stop_token_ids, limits.vocab_size)
    stop_ids = frozenset(stopping.stop_token_ids)
    if not stopping.ignore_eos:
        stop_ids |= frozenset(limits.eos_token_ids)
    beam = _beam(message)
    response = _response(message, limits, beam)
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else None
    if max_tokens == 0 and not (response.echo or response.num_prompt_logprobs is not None):
        raise InvalidArgument(
            "stopping.max_tokens", "at least 1, except with echo or prompt_logprobs", 0
        )
    _check_min_tokens(stopping.min_tokens, max_tokens, sampling, stop_ids)
    return Options(
        request_id=message.request_id or new_request_id(),
        prompt_field=prompt_field,
        sampling=sampling,
        max_tokens=max_tokens,
        min_tokens=stopping.min_tokens,
        stop_token_ids=stop_ids,
        beam=beam,
        text=_text(message, prompt_field),
        response=response,
    )


def build(
    message: inference_pb2.GenerateRequest,
    options: Options,
    prompt_tokens: list[int],
    limits: ServedLimits,
    *,
    arrival: float,
    deadline: float | None,
) -> Validated:
    """Join options and prompt, and check the lengths.

    Raises:  InvalidArgument: naming the first field that is out of bounds.
    """
    _check_prompt(options, prompt_tokens, limits)
    max_tokens = _max_tokens(options, len(prompt_tokens), limits)
    _check_resumed_lengths(message, max_tokens)
    response = options.response
    num_logprobs = response.num_logprobs
    if num_logprobs is None and response.num_sequences > response.n:
        num_logprobs = 0  # ranking needs those of the chosen tokens
    request = Request(
        request_id=options.request_id,
        prompt_tokens=prompt_tokens,
        sampling=options.sampling,
        max_tokens=max_tokens,
        min_tokens=options.min_tokens,
        stop_token_ids=options.stop_token_ids,
        n=response.n,
        best_of=response.num_sequences,
        beam=options.beam if max_tokens else None,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=response.num_prompt_logprobs,
        priority=message.priority,
        tenant=message.tenant,
        cache_salt=message.cache.salt,
        # a prefix hit would skip positions whose log-probabilities were asked for
        use_cache=not message.cache.disable and response.num_prompt_logprobs is None,
        # ranked choices are generated anew: which of them a client has is known at the end
        resumed={} if response.is_ranked else response.resumed,
        arrival=arrival,
        deadline=deadline,
    )
    return Validated(request, options.text, response)


def _check_names(message: inference_pb2.GenerateRequest) -> None:
    if message.request_id and not _REQUEST_ID.fullmatch(message.request_id):
        bound = "at most 128 characters of A-Z a-z 0-9 . _ : -"
        raise InvalidArgument("request_id", bound, bounds.shown(message.request_id))
    bounds.short("tenant", message.tenant, _MAX_NAME_CHARACTERS)
    bounds.short("cache.salt", message.cache.salt, _MAX_NAME_CHARACTERS)


def _sampling(params: types_pb2.SamplingParams, limits: ServedLimits) -> SamplingParams:
    def value(name: str, default: float, low: float, high: float, *, above: bool = False) -> float:
        given = getattr(params, name) if params.HasField(name) else default  # type: ignore[arg-type]  # the stub lists the names
        return bounds.number(f"sampling.{name}", given, low, high, above=above)

    defaults = limits.sampling
    top_k = params.top_k if params.HasField("top_k") else defaults.top_k
    return SamplingParams(
        temperature=value("temperature", defaults.temperature, 0, 100),
        top_k=0 if top_k >= limits.vocab_size else top_k,
        top_p=value("top_p", defaults.top_p, 0, 1, above=True),
        min_p=value("min_p", 0, 0, 1),
        repetition_penalty=value("repetition_penalty", 1, 0.01, 100),
        presence_penalty=value("presence_penalty", 0, -2, 2),
        frequency_penalty=value("frequency_penalty", 0, -2, 2),
        seed=params.seed if params.HasField("seed") else secrets.randbits(_SEED_BITS),
        logit_bias=_logit_bias(params, limits.vocab_size),
        allowed_token_ids=_allowed(params, limits.vocab_size),
    )


def _logit_bias(params: types_pb2.SamplingParams, vocab_size: int) -> dict[int, float]:
    if len(params.logit_bias) > _MAX_BIASES:
        bound = f"at most {_MAX_BIASES} entries"
        raise InvalidArgument("sampling.logit_bias", bound, len(params.logit_bias))
    for token_id, bias in params.logit_bias.items():
        if token_id >= vocab_size:
            bound = f"on token ids below the vocabulary size of {vocab_size}"
            raise InvalidArgument("sampling.logit_bias", bound, token_id)
        bounds.number(f"sampling.logit_bias[{token_id}]", bias, -100, 100)
    return dict(params.logit_bias)


def _allowed(params: types_pb2.SamplingParams, vocab_size: int) -> tuple[int, ...]:
    name = "sampling.allowed_token_ids"
    bounds.count(name, params.allowed_token_ids, _MAX_ALLOWED)
    return tuple(dict.fromkeys(bounds.token_ids(name, params.allowed_token_ids, vocab_size)))


def _check_min_tokens(
    min_tokens: int, max_tokens: int | None, sampling: SamplingParams, stop_ids: frozenset[int]
) -> None:
    if max_tokens is not None and min_tokens > max_tokens:
        bound = f"at most max_tokens, {max_tokens}"
        raise InvalidArgument("stopping.min_tokens", bound, min_tokens)
    if (
        min_tokens
        and sampling.allowed_token_ids
        and stop_ids.issuperset(sampling.allowed_token_ids)
    ):
        bound = "more than stop tokens while min_tokens holds those back"
        raise InvalidArgument("sampling.allowed_token_ids", bound)


def _beam(message: inference_pb2.GenerateRequest) -> BeamParams | None:
    if not message.HasField("beam"):
        return None
    beam = message.beam
    penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
    return BeamParams(
        width=bounds.between("beam.width", beam.width, 2, _MAX_BEAM_WIDTH),
        length_penalty=bounds.number(
            "beam.length_penalty", penalty, -_MAX_LENGTH_PENALTY, _MAX_LENGTH_PENALTY
        ),
        early_stopping=beam.early_stopping,
    )


def _response(
    message: inference_pb2.GenerateRequest, limits: ServedLimits, beam: BeamParams | None
) -> ResponseOptions:
    n = bounds.between("n", message.n or 1, 1, MAX_CHOICES)
    if beam is not None and n > beam.width:
        raise InvalidArgument("n", f"at most the beam's width, {beam.width}", n)
    best_of = bounds.between("best_of", message.best_of or n, n, MAX_CHOICES)
    if beam is not None and best_of != n:
        raise InvalidArgument("best_of", "unset, or n, with beam search", best_of)
    output = message.output
    logprobs = prompt_logprobs = None
    if output.HasField("logprobs"):
        logprobs = bounds.at_most("output.logprobs", output.logprobs, MAX_LOGPROBS)
    if output.HasField("prompt_logprobs"):
        name = "output.prompt_logprobs"
        prompt_logprobs = bounds.at_most(name, output.prompt_logprobs, MAX_LOGPROBS)
    return ResponseOptions(
        n=n,
        num_sequences=best_of,
        is_ranked=beam is not None or best_of > n,
        echo=output.echo,
        num_logprobs=logprobs,
        num_prompt_logprobs=prompt_logprobs,
        resumed=_resumed(message, n, limits.vocab_size),
        stop_token_ids=frozenset(message.stopping.stop_token_ids),
    )


def _resumed(
    message: inference_pb2.GenerateRequest, n: int, vocab_size: int
) -> dict[int, tuple[int, ...]]:
    bounds.count("resume", message.resume, n)
    resumed: dict[int, tuple[int, ...]] = {}
    for position, choice in enumerate(message.resume):
        name = f"resume[{position}]"
        if choice.index >= n:
            raise InvalidArgument(f"{name}.index", f"below n, {n}", choice.index)
        if choice.index in resumed:
            raise InvalidArgument(f"{name}.index", "named once", choice.index)
        ids = bounds.token_ids(f"{name}.token_ids", choice.token_ids, vocab_size)
        resumed[choice.index] = tuple(ids)
    return resumed


def _text(message: inference_pb2.GenerateRequest, prompt_field: str) -> TextOptions:
    stopping = message.stopping
    bounds.count("stopping.stop", stopping.stop, _MAX_STOPS)
    for position, stop in enumerate(stopping.stop):
        size = len(stop.encode())
        if not 1 <= size <= _MAX_STOP_BYTES:
            bound = f"between 1 and {_MAX_STOP_BYTES} bytes"
            raise InvalidArgument(f"stopping.stop[{position}]", bound, size)
    return TextOptions(
        omit_text=message.output.omit_text,
        keep_special_tokens=message.output.keep_special_tokens,
        stop=tuple(stopping.stop),
        include_stop=stopping.include_stop,
        min_tokens=stopping.min_tokens,
        continues_prompt=prompt_field != "chat",
    )


def _check_prompt(options: Options, tokens: list[int], limits: ServedLimits) -> None:
    if not tokens:
        raise InvalidArgument(options.prompt_field, "not empty")
    room_needed = 0 if options.max_tokens == 0 else 1
    longest = limits.max_model_len - room_needed
    if len(tokens) > longest:
        bound = f"at most {longest} tokens long (the context is {limits.max_model_len} tokens)"
        raise InvalidArgument(options.prompt_field, bound, f"{len(tokens)} tokens")


def _max_tokens(options: Options, num_prompt_tokens: int, limits: ServedLimits) -> int:
    """What was asked for, if there is room; otherwise all the room there is."""
    room = limits.max_model_len - num_prompt_tokens
    if options.max_tokens is not None:
        if options.max_tokens > room:
            bound = (
                f"at most {room} (the context of {limits.max_model_len} tokens less the "
                f"prompt's {num_prompt_tokens})"
            )
            raise InvalidArgument("stopping.max_tokens", bound, options.max_tokens)
        return options.max_tokens
    width = options.beam.width if options.beam else options.response.num_sequences
    pool_room = limits.kv_capacity_tokens - num_prompt_tokens
    if width > 1:
        pool_room = pool_room // width - _ROUNDING_TOKENS
    max_tokens = max(1, min(room, pool_room))
    bounds.at_most("stopping.min_tokens", options.min_tokens, max_tokens)
    return max_tokens


def _check_resumed_lengths(message: inference_pb2.GenerateRequest, max_tokens: int) -> None:
    for position, choice in enumerate(message.resume):
        if len(choice.token_ids) > max_tokens:
            bound = f"at most max_tokens, {max_tokens}, tokens long"
            name = f"resume[{position}].token_ids"
            raise InvalidArgument(name, bound, len(choice.token_ids))
