"""InferenceService: the four methods, and what happens when they fail."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message as ProtoMessage
from octavo.v1 import inference_pb2

from scheduler_svc.api import bounds, gen_ai, status, validation
from scheduler_svc.api.codec import Malformed, register
from scheduler_svc.api.generation import Generation
from scheduler_svc.api.ports import Engine, TokenStream
from scheduler_svc.core.request import FinishReason
from scheduler_svc.errors import (
    DeadlineExceeded,
    InvalidArgument,
    OctavoError,
    ReaderStalled,
    RequestFailed,
    Unavailable,
    UnknownModel,
)
from scheduler_svc.logs import bound_ids, get_logger
from scheduler_svc.model_files import ModelFiles
from scheduler_svc.observation.observer import Observer
from scheduler_svc.observation.spans import RequestSpan
from scheduler_svc.security.gate import Gate, caller_ids
from scheduler_svc.security.limits import Ticket
from scheduler_svc.text.assembler import TextAssembler
from scheduler_svc.text.chat_template import Message
from scheduler_svc.text.tokenizer import TextCodec

_log = get_logger(__name__)
_MAX_NAME_CHARACTERS = 256
_MAX_MESSAGES = 4096
_MAX_ROLE_CHARACTERS = 64
_MAX_TOKENS_TO_TEXT = 1024 * 1024
_MAX_TOKENS_TO_BYTES = 4096
_INTERNAL = "internal error; the service's log has more under the request id"

Context = grpc.aio.ServicerContext[Any, Any]
Req = TypeVar("Req", bound=ProtoMessage)
Res = TypeVar("Res")


class InferenceServicer:
    """Answers the public API over an engine.

    Whatever way a call ends, its stream is cancelled and its blocks are given back.
    """

    def __init__(
        self,
        engine: Engine,
        model: ModelFiles,
        codec: TextCodec,
        *,
        gate: Gate | None = None,
        max_model_len: int = 0,
        reader_timeout_seconds: float = math.inf,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve one model.

        Args:
            engine: runs the requests.
            model: what is served.
            codec: its tokenizer and template.
            gate: says whom a call counts for, and keeps it within limits; None: lets all in.
            max_model_len: cap in tokens; 0 is none.
            reader_timeout_seconds: a client that takes nothing for so long is given up.
            observer: is told of requests and refusals; None: nobody is.
            clock: the one that the engine plans by, in seconds.
        """
        self._engine = engine
        self._model = model
        self._codec = codec
        self._gate = gate or Gate()
        self._max_model_len = max_model_len
        self._reader_timeout_seconds = reader_timeout_seconds
        self._observer = observer or Observer()
        self._clock = clock
        self._is_draining = False
        self._num_active = 0

    @property
    def num_active(self) -> int:
        """Generate calls whose streams are open."""
        return self._num_active

    def begin_drain(self) -> None:
        """Refuse new Generate calls from now on; open streams go on."""
        self._is_draining = True

    async def generate(
        self, message: inference_pb2.GenerateRequest | Malformed, context: Context
    ) -> None:
        """Stream one request's choices.

        A coroutine that writes, not a generator: when the client cancels, the exception
        is raised here, at the write or the wait, and not in a generator left behind.
        """
        if not isinstance(message, Malformed) and not message.request_id:
            message.request_id = validation.new_request_id()
        await self._answer(self._generate, message, context)

    async def tokenize(
        self, message: inference_pb2.TokenizeRequest | Malformed, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Give the token ids that Generate would use."""
        return await self._answer(self._tokenize, message, context)

    async def detokenize(
        self, message: inference_pb2.DetokenizeRequest | Malformed, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Give the text of token ids."""
        return await self._answer(self._detokenize, message, context)

    async def get_model(
        self, message: inference_pb2.GetModelRequest | Malformed, context: Context
    ) -> inference_pb2.GetModelResponse:
        """Describe the model that is served."""
        return await self._answer(self._get_model, message, context)

    async def _answer(
        self,
        method: Callable[[Req, Context], Awaitable[Res]],
        message: Req | Malformed,
        context: Context,
    ) -> Res:
        """Run a method and turn its exception, if any, into a status."""
        request_id = str(getattr(message, "request_id", "") or validation.new_request_id())[:128]
        with bound_ids(request_id=request_id, **caller_ids()):
            try:
                if isinstance(message, Malformed):
                    raise message.error
                return await method(message, context)
            except OctavoError as error:
                failure = status.from_error(error)
                self._observer.meter.note_refused(type(error).__name__)
                _log.info("request_refused", error=type(error).__name__)
            except Exception:
                failure = status.internal(_INTERNAL, request_id)
                _log.exception("request_failed")
        return await status.abort(context, failure)

    async def _generate(self, message: inference_pb2.GenerateRequest, context: Context) -> None:
        name = f"{gen_ai.operation(message)} {self._model.name}"
        metadata = context.invocation_metadata() or ()
        with self._observer.spans.serve(message.request_id, name, metadata) as span:
            await self._admit(message, context, span)

    async def _admit(
        self,
        message: inference_pb2.GenerateRequest,
        context: Context,
        span: RequestSpan | None,
    ) -> None:
        """Check a request, and serve it if nothing is wrong with it."""
        arrival = self._clock()
        remaining = context.time_remaining()
        deadline = None if remaining is None else arrival + remaining
        self._check_model(message.model)
        if self._is_draining:
            raise Unavailable("this scheduler is draining: go to another")
        limits = self._limits()
        options = validation.check_options(message, limits)
        with self._gate.enter(message.tenant) as ticket:
            self._engine.check_room(arrival, message.priority)
            message.tenant = ticket.tenant  # its own, or what its API key makes of none
            tokens = await self._prompt_tokens(message)
            validated = validation.build(
                message, options, tokens, limits, arrival=arrival, deadline=deadline
            )
            if span is not None:
                span.set(gen_ai.asked(message, validated.request, self._model.name))
            ticket.charge(len(tokens) + sum(len(choice.token_ids) for choice in message.resume))
            prompt_text = ""
            if validated.response.echo and not validated.text.omit_text:
                keep = validated.text.keep_special_tokens
                prompt_text = await self._codec.decode(tokens, keep_special=keep)
            assembler = TextAssembler(self._codec.vocabulary, validated.text)
            generation = Generation(validated, assembler, prompt_text, self._model.name)
            self._num_active += 1
            try:
                await self._serve(generation, context, ticket)
            finally:
                self._num_active -= 1
                if span is not None:
                    span.set(gen_ai.answered(generation, self._model.name))

    async def _serve(self, generation: Generation, context: Context, ticket: Ticket) -> None:
        """Run one request to its end, and give its blocks back in every case."""
        stream: TokenStream | None = None
        if generation.needs_engine:
            stream = await self._engine.submit(generation.request)
        ticket.accept()
        try:
            await self._relay(generation, stream, context, ticket)
        except asyncio.CancelledError:
            _log.info("request_cancelled", num_tokens=generation.num_completion_tokens)
            raise
        except ReaderStalled:
            raise  # there is nobody to tell how the choices ended
        except DeadlineExceeded as error:
            await self._fail(generation, context, FinishReason.CANCELLED, str(error))
            raise
        except OctavoError as error:
            await self._fail(generation, context, FinishReason.ERROR, str(error))
            raise
        except Exception:
            await self._fail(generation, context, FinishReason.ERROR, _INTERNAL)
            raise
        finally:
            if stream is not None:
                stream.cancel()

    async def _relay(
        self,
        generation: Generation,
        stream: TokenStream | None,
        context: Context,
        ticket: Ticket,
    ) -> None:
        generation.open(_nothing if stream is None else stream.stop)
        await self._send(generation, context)
        while stream is not None and not generation.is_done:
            outputs = await stream.receive()
            if not outputs:
                raise RuntimeError("the engine ended a request before its choices ended")
            ticket.spend(sum(len(output.tokens) for output in outputs))
            generation.accept(outputs, stream.stop)
            await self._send(generation, context)
        generation.close(None if stream is None else stream.stats)
        await self._send(generation, context)
        self._check_ends(generation)
        _log.info("request_finished", num_tokens=generation.num_completion_tokens)

    def _check_ends(self, generation: Generation) -> None:
        """Give the call the status that its choices' ends call for.

        Raises:  OctavoError: if the engine gave any of them up.
        """
        ends = [choice.end for choice in generation.choices if choice.end is not None]
        for end in ends:
            if end.reason is FinishReason.ERROR:
                raise RequestFailed(end.error or "the service could not go on with this request")
        if any(end.reason is FinishReason.CANCELLED for end in ends):
            deadline = generation.request.deadline
            if deadline is not None and self._clock() >= deadline:
                raise DeadlineExceeded("the deadline passed before the request was done")
            raise Unavailable("the service gave the request up: resume it")

    async def _fail(
        self, generation: Generation, context: Context, reason: FinishReason, error: str
    ) -> None:
        """Tell the client how each choice ended, if it is still there."""
        generation.fail(reason, error)
        with contextlib.suppress(Exception):  # the error that led here matters more
            await self._send(generation, context)

    async def _send(self, generation: Generation, context: Context) -> None:
        """Send what is due, at the client's pace, as long as it takes anything at all.

        Raises:  ReaderStalled: if it takes nothing for too long.
        """
        while generation.outbox:
            try:
                async with asyncio.timeout(self._reader_timeout_seconds):
                    await context.write(generation.outbox.popleft())
            except TimeoutError:
                seconds = f"{self._reader_timeout_seconds:g}"
                raise ReaderStalled(f"the client took nothing for {seconds} seconds") from None

    async def _prompt_tokens(self, message: inference_pb2.GenerateRequest) -> list[int]:
        match message.WhichOneof("prompt"):
            case "text":
                if not message.text:
                    raise InvalidArgument("text", "not empty")
                return await self._codec.encode(bounds.text("text", message.text))
            case "chat":
                return await self._codec.encode_chat(_turns(message.chat))
            case _:
                return bounds.token_ids("tokens.ids", message.tokens.ids, self._limits().vocab_size)

    async def _tokenize(
        self, message: inference_pb2.TokenizeRequest, _: Context
    ) -> inference_pb2.TokenizeResponse:
        self._check_model(message.model)
        with self._gate.enter("") as ticket:
            match message.WhichOneof("input"):
                case "text":
                    ids = await self._codec.encode(bounds.text("text", message.text))
                case "chat":
                    ids = await self._codec.encode_chat(_turns(message.chat))
                case _:
                    raise InvalidArgument("input", "set: one of text, chat")
            ticket.accept()
        return inference_pb2.TokenizeResponse(token_ids=ids)

    async def _detokenize(
        self, message: inference_pb2.DetokenizeRequest, _: Context
    ) -> inference_pb2.DetokenizeResponse:
        self._check_model(message.model)
        if message.include_token_bytes:
            return self._token_bytes(message)
        with self._gate.enter("") as ticket:
            bounds.count("token_ids", message.token_ids, _MAX_TOKENS_TO_TEXT)
            ids = bounds.token_ids("token_ids", message.token_ids, self._model.vocab_size)
            text = await self._codec.decode(ids, keep_special=message.keep_special_tokens)
            ticket.accept()
        return inference_pb2.DetokenizeResponse(text=text)

    def _token_bytes(
        self, message: inference_pb2.DetokenizeRequest
    ) -> inference_pb2.DetokenizeResponse:
        """Say what tokens stand for, past all limits of the tenant.

        Who shows log-probabilities asks while its Generate runs: a tenant with room for one
        call could not have them.
        """
        bounds.count("token_ids", message.token_ids, _MAX_TOKENS_TO_BYTES)
        ids = bounds.token_ids("token_ids", message.token_ids, self._model.vocab_size)
        look_up, keep = self._codec.vocabulary.token_bytes, message.keep_special_tokens
        return inference_pb2.DetokenizeResponse(
            token_bytes=[look_up(token_id, keep_special=keep) for token_id in ids]
        )

    async def _get_model(
        self, message: inference_pb2.GetModelRequest, _: Context
    ) -> inference_pb2.GetModelResponse:
        self._check_model(message.model)
        model, limits = self._model, self._engine.describe()
        lengths = [model.max_model_len, self._max_model_len, limits and limits.max_model_len]
        return inference_pb2.GetModelResponse(
            model=model.name,
            fingerprint=model.fingerprint,
            max_model_len=min((length for length in lengths if length), default=0),
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=self._codec.has_chat_template,
            kv_capacity_tokens=limits.kv_capacity_tokens if limits else 0,
            dtype=limits.dtype if limits else "",
        )

    def _check_model(self, name: str) -> None:
        bounds.short("model", name, _MAX_NAME_CHARACTERS)
        if name and name != self._model.name:
            raise UnknownModel(f"model {bounds.shown(name)} is not served, {self._model.name} is")

    def _limits(self) -> validation.ServedLimits:
        limits = self._engine.describe()
        if limits is None:
            raise Unavailable("no executor is connected")
        return validation.ServedLimits.of(self._model, limits, self._max_model_len)


def add_to_server(servicer: InferenceServicer, server: grpc.aio.Server) -> None:
    """Register the service with deserializers that answer bad bytes properly."""
    register(
        server,
        inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
        {
            "Generate": servicer.generate,
            "Tokenize": servicer.tokenize,
            "Detokenize": servicer.detokenize,
            "GetModel": servicer.get_model,
        },
    )


def _turns(chat: inference_pb2.ChatPrompt) -> list[Message]:
    if not chat.messages:
        raise InvalidArgument("chat.messages", "at least 1")
    bounds.count("chat.messages", chat.messages, _MAX_MESSAGES)
    for position, message in enumerate(chat.messages):
        name = f"chat.messages[{position}]"
        if not message.role:
            raise InvalidArgument(f"{name}.role", "not empty")
        bounds.short(f"{name}.role", message.role, _MAX_ROLE_CHARACTERS)
        bounds.text(f"{name}.content", message.content)
    return [Message(message.role, message.content) for message in chat.messages]


def _nothing(_: int) -> None:
    """Stop nothing: there is no engine behind this request."""
