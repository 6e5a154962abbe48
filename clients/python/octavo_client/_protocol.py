"""Between plain values and protobuf, without any I/O: both clients share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from octavo.v1 import inference_pb2, types_pb2

from octavo_client._types import (
    Beam,
    Choice,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateParams,
    Health,
    Message,
    Model,
    PositionLogprobs,
    Started,
    TokenLogprob,
    Usage,
)
from octavo_client.errors import Internal, InvalidArgument

_T = TypeVar("_T")

_WHOLE_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}

# Parameter -> path of its field in GenerateRequest. One table, so that the flat names of
# the client and the nested ones of the wire cannot drift apart unseen.
_SCALARS: dict[str, str] = {
    "request_id": "request_id",
    "model": "model",
    "temperature": "sampling.temperature",
    "top_k": "sampling.top_k",
    "top_p": "sampling.top_p",
    "min_p": "sampling.min_p",
    "repetition_penalty": "sampling.repetition_penalty",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "seed": "sampling.seed",
    "max_tokens": "stopping.max_tokens",
    "min_tokens": "stopping.min_tokens",
    "include_stop": "stopping.include_stop",
    "ignore_eos": "stopping.ignore_eos",
    "n": "n",
    "best_of": "best_of",
    "omit_text": "output.omit_text",
    "logprobs": "output.logprobs",
    "prompt_logprobs": "output.prompt_logprobs",
    "echo": "output.echo",
    "keep_special_tokens": "output.keep_special_tokens",
    "priority": "priority",
    "tenant": "tenant",
    "cache_disable": "cache.disable",
    "cache_salt": "cache.salt",
}
_LISTS: dict[str, str] = {
    "allowed_token_ids": "sampling.allowed_token_ids",
    "stop": "stopping.stop",
    "stop_token_ids": "stopping.stop_token_ids",
}

_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    types_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    types_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}


def build_generate(
    prompt: str | None,
    tokens: Sequence[int] | None,
    messages: Sequence[Message | Mapping[str, str]] | None,
    params: GenerateParams,
) -> inference_pb2.GenerateRequest:
    """Build the request. Bounds are the service's to check; types and ranges are checked here.

    Raises:
        InvalidArgument: if not exactly one of prompt, tokens and messages is given, or a
            value does not fit into its field.
        TypeError: if a parameter is unknown.
    """
    request = inference_pb2.GenerateRequest()
    if sum(source is not None for source in (prompt, tokens, messages)) != 1:
        bound = "exactly one of prompt, tokens and messages"
        raise InvalidArgument(f"give {bound}", field="prompt", bound=bound)
    if prompt is not None:
        assign_field(request, "text", prompt)
    elif tokens is not None:
        request.tokens.SetInParent()
        _extend(request, "tokens.ids", tokens)
    else:
        fill_chat(request.chat, messages or ())
    for name, value in params.items():
        if value is not None:
            _set_param(request, name, value)
    return request


def _set_param(request: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if name in _SCALARS:
        assign_field(request, _SCALARS[name], value)
    elif name in _LISTS:
        _extend(request, _LISTS[name], [value] if isinstance(value, str) else value)
    elif name == "logit_bias":
        _checked("sampling.logit_bias", partial(request.sampling.logit_bias.update, value))
    elif name == "beam":
        beam = cast("Beam", value)
        assign_field(request, "beam.width", beam.width)
        if beam.length_penalty is not None:
            assign_field(request, "beam.length_penalty", beam.length_penalty)
        assign_field(request, "beam.early_stopping", beam.early_stopping)
    else:
        raise TypeError(f"generate has no parameter {name!r}")


def assign_field(message: Any, path: str, value: object) -> None:
    """Set the field at a dotted path; InvalidArgument names it if the value does not fit."""
    *parents, leaf = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    bounds = _WHOLE_NUMBERS.get(message.DESCRIPTOR.fields_by_name[leaf].cpp_type)
    if bounds is not None and isinstance(value, int) and not bounds[0] <= value <= bounds[1]:
        bound = f"must be from {bounds[0]} to {bounds[1]}, got {value}"
        raise InvalidArgument(f"{path} {bound}", field=path, bound=bound)
    _checked(path, partial(setattr, message, leaf, value))


def _extend(message: Any, path: str, values: Iterable[object]) -> None:
    for name in path.split("."):
        message = getattr(message, name)
    _checked(path, partial(message.extend, values))


def _checked(path: str, store: Callable[[], None]) -> None:
    """Store a value; what protobuf refuses becomes an error that names the field."""
    try:
        store()
    except (TypeError, ValueError) as error:
        bound = str(error)
        raise InvalidArgument(f"{path}: {bound}", field=path, bound=bound) from None


def fill_chat(
    chat: inference_pb2.ChatPrompt, messages: Sequence[Message | Mapping[str, str]]
) -> None:
    """Put messages into a chat prompt; mappings have the keys role and content.

    Raises:
        InvalidArgument: if a message lacks one of the two, or has something else.
    """
    chat.SetInParent()
    for number, message in enumerate(messages):
        if isinstance(message, Message):
            role, content = message.role, message.content
        elif isinstance(message, Mapping) and set(message) == {"role", "content"}:
            role, content = message["role"], message["content"]
        else:
            bound = "role and content, both strings"
            raise InvalidArgument(
                f"chat.messages[{number}] must have {bound}",
                field=f"chat.messages[{number}]",
                bound=bound,
            )
        turn = chat.messages.add()
        for name, text in (("role", role), ("content", content)):
            _checked(f"chat.messages[{number}].{name}", partial(setattr, turn, name, text))


def build_tokenize(
    text: str | None, messages: Sequence[Message | Mapping[str, str]] | None, model: str
) -> inference_pb2.TokenizeRequest:
    """Build the request for one of text and messages."""
    if (text is None) == (messages is None):
        bound = "exactly one of text and messages"
        raise InvalidArgument(f"give {bound}", field="text", bound=bound)
    request = inference_pb2.TokenizeRequest(model=model)
    if text is not None:
        assign_field(request, "text", text)
    else:
        fill_chat(request.chat, messages or ())
    return request


def build_detokenize(
    token_ids: Sequence[int],
    keep_special_tokens: bool,
    model: str,
    *,
    include_token_bytes: bool = False,
) -> inference_pb2.DetokenizeRequest:
    """Build the request for token ids."""
    request = inference_pb2.DetokenizeRequest(
        model=model,
        keep_special_tokens=keep_special_tokens,
        include_token_bytes=include_token_bytes,
    )
    _extend(request, "token_ids", token_ids)
    return request


def parse_event(response: inference_pb2.GenerateResponse) -> Event | None:
    """Read one event; None for a kind that this client does not know yet."""
    match response.WhichOneof("event"):
        case "started":
            return copy_fields(Started, response.started)
        case "delta":
            delta = response.delta
            return Delta(
                index=delta.index,
                text=delta.text,
                token_ids=tuple(delta.token_ids),
                logprobs=tuple(_parse_logprobs(position) for position in delta.logprobs),
                is_prompt=delta.is_prompt,
            )
        case "finished":
            return _parse_finished(response.finished)
        case "usage":
            return copy_fields(Usage, response.usage)
        case _:
            return None


def _parse_finished(finished: inference_pb2.Finished) -> Finished:
    reason = _FINISH_REASONS.get(finished.reason)
    if reason is None:
        raise Internal(f"choice {finished.index} ended with unknown reason {finished.reason}")
    which = finished.WhichOneof("stopped_by")
    return Finished(
        index=finished.index,
        reason=reason,
        num_tokens=finished.num_tokens,
        stopped_by=getattr(finished, which) if which else None,
        cumulative_logprob=(
            finished.cumulative_logprob if finished.HasField("cumulative_logprob") else None
        ),
        error=finished.error,
    )


def _parse_logprobs(position: types_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        chosen=copy_fields(TokenLogprob, position.chosen),
        top=tuple(copy_fields(TokenLogprob, token) for token in position.top),
    )


class CompletionBuilder:
    """Adds the events of a stream up to a Completion."""

    def __init__(self) -> None:
        self._started: Started | None = None
        self._usage = Usage()
        self._deltas: dict[int, list[Delta]] = {}
        self._finished: dict[int, Finished] = {}

    def add(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case Started():
                self._started = event
            case Delta():
                self._deltas.setdefault(event.index, []).append(event)
            case Finished():
                self._finished[event.index] = event
            case Usage():
                self._usage = event

    def build(self) -> Completion:
        """Return the whole answer.

        Raises:
            Internal: if the stream lacked its start or any finished choice.
        """
        if self._started is None or not self._finished:
            raise Internal("the stream ended without an answer")
        return Completion(
            request_id=self._started.request_id,
            model=self._started.model,
            seed=self._started.seed,
            choices=tuple(self._choice(index) for index in sorted(self._finished)),
            usage=self._usage,
        )

    def _choice(self, index: int) -> Choice:
        deltas = self._deltas.get(index, [])
        echo = [delta for delta in deltas if delta.is_prompt]
        new = [delta for delta in deltas if not delta.is_prompt]
        end = self._finished[index]
        return Choice(
            index=index,
            text="".join(delta.text for delta in new),
            token_ids=tuple(token for delta in new for token in delta.token_ids),
            finish_reason=end.reason,
            logprobs=tuple(position for delta in new for position in delta.logprobs),
            stopped_by=end.stopped_by,
            cumulative_logprob=end.cumulative_logprob,
            error=end.error,
            prompt_text="".join(delta.text for delta in echo),
            prompt_token_ids=tuple(token for delta in echo for token in delta.token_ids),
            prompt_logprobs=tuple(position for delta in echo for position in delta.logprobs),
        )


def parse_model(response: inference_pb2.GetModelResponse) -> Model:
    """Read the description of the model."""
    return copy_fields(Model, response, eos_token_ids=tuple(response.eos_token_ids))


def parse_health(status: int) -> Health:
    """Read a status of grpc.health.v1."""
    return {1: Health.SERVING, 2: Health.NOT_SERVING}.get(status, Health.UNKNOWN)


def copy_fields(kind: type[_T], message: Any, /, **parsed: Any) -> _T:
    """Copy the fields that a dataclass and a message share by name."""
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]  # _T is a dataclass
    return kind(
        **{name: parsed[name] if name in parsed else getattr(message, name) for name in names}
    )
