"""Tests of scheduler_svc.text.tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from scheduler_svc.errors import InvalidArgument, QueueFull, StartupError
from scheduler_svc.model_files import ModelFiles
from scheduler_svc.text.chat_template import ChatTemplate, Message
from scheduler_svc.text.tokenizer import TextCodec


@pytest.fixture
async def codec(byte_level_tokenizer: Tokenizer) -> AsyncIterator[TextCodec]:
    byte_level_tokenizer.enable_truncation(4)
    template = ChatTemplate("<|start|>{{ messages[0].content }}", {})
    codec = TextCodec(byte_level_tokenizer, chat_template=template)
    yield codec
    codec.close()


def model(folder: Path, **fields: object) -> ModelFiles:
    values: dict[str, object] = {
        "name": "m",
        "folder": folder,
        "fingerprint": "",
        "max_model_len": 64,
        "vocab_size": 400,
        "eos_token_ids": (0,),
    }
    return ModelFiles(**(values | fields))  # type: ignore[arg-type]  # by the names of ModelFiles


async def test_text_is_never_truncated(codec: TextCodec) -> None:
    """A tokenizer file's own truncation is off: a long prompt is an error, not a cut."""
    text = "hello world the quick brown fox"
    assert await codec.decode(await codec.encode(text), keep_special=False) == text


async def test_a_megabyte_does_not_stall_the_loop(codec: TextCodec) -> None:
    """While a long text is tokenized, and its ids made text, the loop keeps turning."""
    text = "hello world " * 90_000
    job = asyncio.create_task(codec.encode(text))
    longest = 0.0
    while not job.done():
        begin = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - begin)
    assert len(await job) > 100_000
    assert longest < 0.1


async def test_chat_takes_special_tokens_from_the_template(codec: TextCodec) -> None:
    """The rendered conversation is tokenized as it is, special tokens recognised."""
    ids = await codec.encode_chat([Message("user", "hello")])
    assert ids[0] == 1
    assert await codec.decode(ids, keep_special=True) == "<|start|>hello"


async def test_a_model_without_template_refuses_chat(byte_level_tokenizer: Tokenizer) -> None:
    """The error names the chat field."""
    codec = TextCodec(byte_level_tokenizer)
    with pytest.raises(InvalidArgument, match="no chat template") as caught:
        await codec.encode_chat([Message("user", "hello")])
    assert caught.value.field == "chat"
    codec.close()


async def test_the_queue_is_bounded(byte_level_tokenizer: Tokenizer) -> None:
    """More texts than may wait are refused at once, and there is room again later."""
    codec = TextCodec(byte_level_tokenizer, num_threads=1, max_pending=2)
    waiting = [asyncio.create_task(codec.encode("hello world " * 50_000)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as caught:
        await codec.encode("hello")
    assert caught.value.retry_seconds > 0
    await asyncio.gather(*waiting)
    assert await codec.encode("hello")
    codec.close()


async def test_a_cancelled_caller_gives_its_place_back(byte_level_tokenizer: Tokenizer) -> None:
    """Clients that go away while their text waits do not fill the queue for ever."""
    codec = TextCodec(byte_level_tokenizer, num_threads=1, max_pending=3)
    for _ in range(20):
        jobs = [asyncio.create_task(codec.encode("hello world " * 500)) for _ in range(3)]
        await asyncio.sleep(0)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        await codec.encode("hello")  # behind them all, in the one thread
    codec.close()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ["h"]),
        ({"add_bos_token": True}, ["<|start|>", "h"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<|start|>", "h", "<|end|>"]),
        ({"add_bos_token": False}, ["h"]),
    ],
)
async def test_plain_text_is_framed_as_the_configuration_says(
    byte_level_tokenizer: Tokenizer,
    tmp_path: Path,
    flags: dict[str, bool],
    expected: list[str],
) -> None:
    """add_bos_token and add_eos_token are honoured for text."""
    byte_level_tokenizer.save(str(tmp_path / "tokenizer.json"))
    special = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    codec = TextCodec.load(model(tmp_path, special_tokens=special, **flags))
    ids = await codec.encode("h")
    assert [byte_level_tokenizer.id_to_token(token_id) for token_id in ids] == expected
    codec.close()


async def test_tokens_named_special_are_special(
    byte_level_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """An end token that only tokenizer_config.json calls special is left out of texts."""
    byte_level_tokenizer.save(str(tmp_path / "tokenizer.json"))
    special = {"eos_token": "<tool>", "pad_token": "<not in the vocabulary>"}
    codec = TextCodec.load(model(tmp_path, special_tokens=special))
    tool = byte_level_tokenizer.token_to_id("<tool>")
    assert await codec.decode([tool], keep_special=False) == ""
    assert codec.vocabulary.is_special(tool)
    codec.close()


def test_a_broken_tokenizer_stops_the_start(tmp_path: Path) -> None:
    """The error is one line that names the file."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        TextCodec.load(model(tmp_path))
