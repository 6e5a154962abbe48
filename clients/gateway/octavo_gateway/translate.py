"""From a checked body to what the SDK is called with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

from octavo_client import Beam, GenerateParams, Message

from octavo_gateway.errors import ApiError, invalid
from octavo_gateway.names import FieldNames
from octavo_gateway.schema import ChatBody, CompletionBody, GenerateBody, Turn

MAX_PROMPTS = 1024
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions only
_SEED_MODULUS = 2**64
_UINT32 = 2**32 - 1
_ID = re.compile(r"[0-9]{1,10}")
# The newer name of a role that templates know by the older one.
_ROLES = {"developer": "system"}


class Source(TypedDict, total=False):
    """A prompt, as the SDK takes it: exactly one is there."""

    prompt: str
    tokens: Sequence[int]
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of Generate."""

    source: Source
    names: FieldNames


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request, translated.

    Attributes:
        calls: one per prompt.
        params: the same for all of them.
        n: choices of each call.
        stream: whether to answer as server-sent events.
        include_usage: whether the last event is the usage.
        echo: whether the prompt's text comes first.
        logprobs: how many of the likeliest tokens to show for each; None: no logprobs.
        prompt_logprobs: the same, for the extension of that name.
        return_token_ids: whether token ids are shown.
        keeps_special: whether special tokens stay in the text.
    """

    calls: tuple[Call, ...]
    params: GenerateParams
    n: int
    stream: bool
    include_usage: bool
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None
    return_token_ids: bool
    keeps_special: bool


def from_completion(body: CompletionBody) -> Job:
    """Translate POST /v1/completions.

    Raises:
        ApiError: 400, naming the parameter.
    """
    params = _params(body)
    params.setdefault("max_tokens", DEFAULT_COMPLETION_TOKENS)
    renamed = _beam(body, params)
    if body.logprobs is not None:
        params["logprobs"] = body.logprobs
        if body.echo:
            params["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
            renamed["output.prompt_logprobs"] = (
                "logprobs" if body.logprobs >= (body.prompt_logprobs or 0) else "prompt_logprobs"
            )
    if body.echo:
        params["echo"] = True
    sources = _prompts(body.prompt)
    names = FieldNames("prompt", renamed)
    many = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    calls = tuple(
        Call(source, names.for_prompt(index) if many else names)
        for index, source in enumerate(sources)
    )
    return _job(body, calls, params, echo=bool(body.echo), logprobs=body.logprobs)


def from_chat(body: ChatBody) -> Job:
    """Translate POST /v1/chat/completions.

    Raises:
        ApiError: 400, naming the parameter.
    """
    params = _params(body)
    renamed = _beam(body, params)
    renamed["output.logprobs"] = "top_logprobs"
    if body.max_completion_tokens is not None:
        params["max_tokens"] = body.max_completion_tokens
        renamed["stopping.max_tokens"] = "max_completion_tokens"
    logprobs = None
    if body.logprobs:
        logprobs = params["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise invalid("top_logprobs", "must be left out unless logprobs is true")
    call = Call({"messages": messages(body.messages)}, FieldNames("messages", renamed))
    return _job(body, (call,), params, echo=False, logprobs=logprobs)


def _job(
    body: GenerateBody,
    calls: tuple[Call, ...],
    params: GenerateParams,
    *,
    echo: bool,
    logprobs: int | None,
) -> Job:
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise invalid("stream_options", "must be left out unless stream is true")
    if body.prompt_logprobs is not None and stream:
        raise invalid("prompt_logprobs", "must be left out when stream is true")
    if body.return_token_ids:
        params["echo"] = True  # the prompt's ids come with its echo
    return Job(
        calls=calls,
        params=params,
        n=body.n or 1,
        stream=stream,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        echo=echo,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        keeps_special=body.skip_special_tokens is False,
    )


def _params(body: GenerateBody) -> GenerateParams:
    """Take over what needs no more than another name; what is left out stays out."""
    check_token_ids("allowed_token_ids", body.allowed_token_ids or ())
    check_token_ids("stop_token_ids", body.stop_token_ids or ())
    given: dict[str, Any] = {
        "model": body.model,
        "n": body.n,
        "best_of": body.best_of,
        "max_tokens": body.max_tokens,
        "min_tokens": body.min_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": _logit_bias(body.logit_bias),
        "allowed_token_ids": body.allowed_token_ids,
        "seed": None if body.seed is None else body.seed % _SEED_MODULUS,
        "stop": _stop(body.stop),
        "stop_token_ids": body.stop_token_ids,
        "include_stop": body.include_stop_str_in_output,
        "ignore_eos": body.ignore_eos,
        "keep_special_tokens": body.skip_special_tokens is False or None,
        "prompt_logprobs": body.prompt_logprobs,
        "priority": body.priority,
        "cache_salt": body.cache_salt,
    }
    return cast("GenerateParams", {k: v for k, v in given.items() if v is not None})


def _beam(body: GenerateBody, params: GenerateParams) -> dict[str, str]:
    """Turn best_of into the width of a beam, where that was asked for; rename the width."""
    if not body.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            value = getattr(body, name)
            if value not in (None, False, 1.0):
                raise invalid(name, "must be left out unless use_beam_search is true")
        return {}
    width = body.best_of or body.n or 1
    params["beam"] = Beam(
        width=width,
        length_penalty=body.length_penalty,
        early_stopping=bool(body.early_stopping),
    )
    params.pop("best_of", None)
    return {"beam.width": "n" if body.best_of is None and body.n is not None else "best_of"}


def _logit_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    for key in bias:
        if not (_ID.fullmatch(key) and int(key) <= _UINT32):
            raise invalid("logit_bias", f"must have token ids as its keys, got {key[:80]!r}")
    return {int(key): value for key, value in bias.items()}


def check_token_ids(param: str, ids: Sequence[object]) -> None:
    """Check that the wire can carry ids; whether the model has them, it knows itself.

    Raises:
        ApiError: 400, naming the first that is none.
    """
    for index, value in enumerate(ids):
        # bool is an int to Python, but not in JSON
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _UINT32:
            raise invalid(f"{param}[{index}]", "must be a token id: a whole number from 0")


def _stop(stop: Any) -> list[str] | None:
    if stop is None or isinstance(stop, str):
        return stop if stop is None else [stop]
    if not isinstance(stop, list):
        raise invalid("stop", "must be a string or a list of strings")
    for index, entry in enumerate(stop):
        if not isinstance(entry, str):
            raise invalid(f"stop[{index}]", "must be a string")
    return stop


def _prompts(prompt: Any) -> list[Source]:
    """Read the four forms: a string, token ids, a list of strings, a list of token ids."""
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise invalid(
            "prompt", "must be a string, a list of strings, token ids or a list of token ids"
        )
    if isinstance(prompt[0], int):
        return [_tokens("prompt", prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"must hold at most {MAX_PROMPTS} prompts, got {len(prompt)}")
    kind = type(prompt[0])
    if kind not in (str, list):
        raise invalid("prompt[0]", "must be a string, a token id or a list of token ids")
    for index, entry in enumerate(prompt):
        if type(entry) is not kind:
            noun = "a string" if kind is str else "a list of token ids"
            raise invalid(f"prompt[{index}]", f"must be {noun}, as the one before it")
    if kind is str:
        return [{"prompt": text} for text in prompt]
    return [_tokens(f"prompt[{index}]", ids) for index, ids in enumerate(prompt)]


def _tokens(param: str, ids: list[Any]) -> Source:
    check_token_ids(param, ids)
    return {"tokens": ids}


def messages(turns: Sequence[Turn]) -> list[Message]:
    """Read a conversation; parts of text are joined by line breaks, as other servers do.

    Raises:
        ApiError: 400, naming the message and the part.
    """
    return [_message(f"messages[{index}]", turn) for index, turn in enumerate(turns)]


def _message(param: str, turn: Turn) -> Message:
    for name in ("tool_calls", "function_call", "audio"):
        if (turn.model_extra or {}).get(name):
            raise _unsupported(f"{param}.{name}", "is not supported: text is all a message has")
    content = turn.content
    if isinstance(content, list):
        content = "\n".join(
            _part(f"{param}.content[{index}]", part) for index, part in enumerate(content)
        )
    if not isinstance(content, str):
        raise invalid(f"{param}.content", "must be a string or a list of parts of type text")
    return Message(_ROLES.get(turn.role, turn.role), content)


def _part(param: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise invalid(param, "must be an object with type and text")
    kind = part.get("type")
    if kind != "text":
        bound = "must be given" if kind is None else f'must be "text", got {str(kind)[:80]!r}'
        raise _unsupported(f"{param}.type", bound)
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{param}.text", "must be a string")
    return text


def _unsupported(param: str, bound: str) -> ApiError:
    return invalid(param, bound, code="unsupported_parameter")
