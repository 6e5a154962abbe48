"""A real server at a free port over an engine that plays a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from octavo.v1 import inference_pb2, inference_pb2_grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from scheduler_svc.api.inference import InferenceServicer, add_to_server
from scheduler_svc.core.request import Request, SequenceOutput
from scheduler_svc.errors import QueueFull
from scheduler_svc.model_files import ModelFiles
from scheduler_svc.text.chat_template import ChatTemplate
from scheduler_svc.text.tokenizer import TextCodec

Item = list[SequenceOutput] | Exception
Script = Callable[[Request], Iterable[Item]]
EOS = 0
VOCAB_SIZE = 300
MAX_MODEL_LEN = 200


@dataclass
class Stats:
    cached_prompt_tokens: int = 3
    num_preemptions: int = 1
    queue_seconds: float = 0.25
    first_token_seconds: float = 0.5
    total_seconds: float = 2.0


@dataclass
class Limits:
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = VOCAB_SIZE
    kv_capacity_tokens: int = 4096
    dtype: str = "float32"


@dataclass
class FakeStream:
    """Gives one item of the script per call, then what the test puts into `more`."""

    items: Iterator[Item]
    more: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)
    stats: Stats = field(default_factory=Stats)
    stopped: list[int] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    num_received: int = 0

    async def receive(self) -> list[SequenceOutput]:
        await asyncio.sleep(0)
        item = next(self.items, None)
        if item is None:
            item = await self.more.get()
        if isinstance(item, Exception):
            raise item
        self.num_received += 1
        return [output for output in item if output.sample_index not in self.stopped]

    def stop(self, sample_index: int) -> None:
        self.stopped.append(sample_index)

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class FakeEngine:
    limits: Limits | None = field(default_factory=Limits)
    error: Exception | None = None
    full: QueueFull | None = None
    script: Script = lambda request: []
    requests: list[Request] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)

    def check_room(self, now: float, priority: int) -> None:
        if self.full is not None:
            raise self.full

    async def submit(self, request: Request) -> FakeStream:
        if self.error is not None:
            raise self.error
        self.requests.append(request)
        self.streams.append(FakeStream(iter(self.script(request))))
        return self.streams[-1]

    def describe(self) -> Limits | None:
        return self.limits


def make_tokenizer() -> Tokenizer:
    """Byte-level; id 0 is the end of sequence, every printable character has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, the quick brown fox"] * 3, trainer)
    return tokenizer


TOKENIZER = make_tokenizer()


@dataclass
class Service:
    engine: FakeEngine
    servicer: InferenceServicer
    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    channel: grpc.aio.Channel

    async def generate(
        self, request: inference_pb2.GenerateRequest, timeout: float | None = 20
    ) -> list[inference_pb2.GenerateResponse]:
        return [event async for event in self.stub.Generate(request, timeout=timeout)]

    async def failing(
        self, request: inference_pb2.GenerateRequest, timeout: float | None = 20
    ) -> tuple[list[inference_pb2.GenerateResponse], grpc.aio.AioRpcError]:
        """The events before the error, and the error."""
        events = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for event in self.stub.Generate(request, timeout=timeout):
                events.append(event)  # noqa: PERF401 - an error ends the loop
        return events, caught.value


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    engine = FakeEngine()
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template = ChatTemplate(source, {})
    codec = TextCodec(TOKENIZER, chat_template=template)
    model = ModelFiles(
        name="tiny",
        folder=Path(),
        fingerprint="f00d",
        max_model_len=512,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
    )
    servicer = InferenceServicer(engine, model, codec)
    server = grpc.aio.server()
    add_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        yield Service(engine, servicer, stub, channel)  # type: ignore[arg-type]  # one stub class serves both kinds of channel
    await server.stop(None)
    codec.close()
