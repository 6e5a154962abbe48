"""The bodies that callers send: which fields there are, and their types.

Types are strict: "5" is no number and 1 is no boolean. null is the same as leaving a
field out. Bounds stand here only where the wire could not even carry a worse value; all
others are the scheduler's. A field that nobody knows is ignored, as OpenAI's clients
expect of servers newer or older than they are; one that is known, asks for something else
and cannot be had is refused by name, since ignoring it would give a wrong answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from octavo_gateway.errors import ApiError, invalid

_UINT32 = 2**32 - 1
_SHOULD = re.compile(r"^\w+ should")  # how pydantic's messages about a value begin
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1


class Body(BaseModel):
    """What all bodies share."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    include_usage: bool | None = None


class GenerateBody(Body):
    """Parameters of both ways to generate; the lower half is not OpenAI's."""

    n: int | None = Field(None, ge=1, le=_UINT32)
    best_of: int | None = Field(None, ge=1, le=_UINT32)
    max_tokens: int | None = Field(None, ge=0, le=_UINT32)
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = Field(None, ge=_MIN_SEED, le=_MAX_SEED)
    stop: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = Field(None, ge=-1, le=_UINT32)
    min_p: float | None = None
    repetition_penalty: float | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = Field(None, ge=0, le=_UINT32)
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=_UINT32)
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = None


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: Any = None
    logprobs: int | None = Field(None, ge=0, le=_UINT32)
    echo: bool | None = None


class Turn(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    role: str = Field(min_length=1)
    content: Any = None


class ChatBody(GenerateBody):
    """POST /v1/chat/completions."""

    messages: list[Turn] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0, le=_UINT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=_UINT32)


class TokenizeBody(Body):
    """POST /tokenize: one of prompt and messages."""

    prompt: str | None = None
    messages: list[Turn] | None = Field(None, min_length=1)
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]


@dataclass(frozen=True, slots=True)
class _Unsupported:
    """A known field that has no effect here.

    Attributes:
        harmless: the values that ask for nothing.
        why: what to say of all others.
    """

    why: str
    harmless: tuple[object, ...] = (None,)


_GRAMMAR = _Unsupported("is not supported: output cannot be held to a grammar")
_TOOLS = "is not supported: the model is not given tools"
_TEMPLATE = "is not supported: the model's own chat template is used as it is"
_TEXT_ONLY = "is not supported: text is all that goes in and out"

_FOR_BOTH = {
    "response_format": _Unsupported(
        'must be {"type": "text"}: output cannot be held to a format', (None, {"type": "text"})
    ),
    "guided_choice": _GRAMMAR,
    "guided_grammar": _GRAMMAR,
    "guided_json": _GRAMMAR,
    "guided_regex": _GRAMMAR,
    "structured_outputs": _GRAMMAR,
    "bad_words": _Unsupported("is not supported: use logit_bias", (None, [])),
    "logits_processors": _Unsupported("is not supported", (None, [])),
    "truncate_prompt_tokens": _Unsupported("is not supported: shorten the prompt"),
}
_FOR_COMPLETIONS = {
    **_FOR_BOTH,
    "suffix": _Unsupported("is not supported: text is continued, not filled in", (None, "")),
    "add_special_tokens": _Unsupported(
        "must be true: or send token ids, which are used as they are", (None, True)
    ),
    "prompt_embeds": _Unsupported(_TEXT_ONLY),
}
_FOR_CHAT = {
    **_FOR_BOTH,
    "tools": _Unsupported(_TOOLS, (None, [])),
    "tool_choice": _Unsupported(_TOOLS, (None, "none", "auto")),
    "functions": _Unsupported(_TOOLS, (None, [])),
    "function_call": _Unsupported(_TOOLS, (None, "none", "auto")),
    "audio": _Unsupported(_TEXT_ONLY),
    "modalities": _Unsupported(_TEXT_ONLY, (None, ["text"])),
    "web_search_options": _Unsupported("is not supported: nothing is searched"),
    "echo": _Unsupported("is not supported in a chat", (None, False)),
    "chat_template": _Unsupported(_TEMPLATE),
    "chat_template_kwargs": _Unsupported(_TEMPLATE, (None, {})),
    "add_generation_prompt": _Unsupported(_TEMPLATE, (None, True)),
    "continue_final_message": _Unsupported(_TEMPLATE, (None, False)),
    "add_special_tokens": _Unsupported(_TEMPLATE, (None, False)),
    "documents": _Unsupported(_TEMPLATE, (None, [])),
}
_FOR_TOKENIZE = {
    "add_special_tokens": _Unsupported("must be left out: Generate has no choice", (None,)),
    **{name: _FOR_CHAT[name] for name in ("tools", "chat_template", "chat_template_kwargs")},
    **{name: _FOR_CHAT[name] for name in ("add_generation_prompt", "continue_final_message")},
}
_UNSUPPORTED: dict[type[Body], Mapping[str, _Unsupported]] = {
    CompletionBody: _FOR_COMPLETIONS,
    ChatBody: _FOR_CHAT,
    TokenizeBody: _FOR_TOKENIZE,
    DetokenizeBody: {},
}
_B = TypeVar("_B", bound=Body)


def parse(kind: type[_B], raw: bytes) -> _B:
    """Read a body.

    Raises:
        ApiError: 400, naming the first field that has the wrong type or is not supported.
    """
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from None
    extra = body.model_extra or {}
    for name, unsupported in _UNSUPPORTED[kind].items():
        if name in extra and extra[name] not in unsupported.harmless:
            raise invalid(name, unsupported.why, code="unsupported_parameter")
    return body


def _explain(error: ErrorDetails) -> ApiError:
    """Say in one line which field is wrong, and what it may be."""
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {error['ctx']['error']}")
    if not error["loc"]:
        return ApiError(400, "the body must be a JSON object")
    param = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]
    ).removeprefix(".")
    if error["type"] == "missing":
        return invalid(param, "must be given")
    bound = _SHOULD.sub("must", error["msg"])
    got = error["input"]
    is_short = isinstance(got, int | float | bool) or (isinstance(got, str) and len(got) <= 80)
    return invalid(param, f"{bound}, got {got!r}" if is_short else bound)
