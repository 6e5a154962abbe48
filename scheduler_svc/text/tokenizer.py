"""Text to token ids, off the event loop.

A megabyte of text takes a good part of a second to tokenize; the streams of others must
not wait for it. So everything longer than a glance runs in a few threads (the tokenizer
releases the interpreter's lock) behind a bounded queue.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from scheduler_svc.errors import InvalidArgument, QueueFull, StartupError
from scheduler_svc.model_files import ModelFiles
from scheduler_svc.text.chat_template import ChatTemplate, Message
from scheduler_svc.text.detokenizer import Vocabulary

_RETRY_SECONDS = 1.0
T = TypeVar("T")


class TextCodec:
    """A model's tokenizer and chat template, usable from an event loop.

    Attributes:
        vocabulary: for streaming token ids back into text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        num_threads: int = 2,
        max_pending: int = 1024,
    ) -> None:
        """Start the threads.

        Args:
            tokenizer: as loaded; truncation and padding are switched off.
            chat_template: None if the model has none.
            num_threads: that tokenize.
            max_pending: jobs waiting or running before more are refused.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.vocabulary = Vocabulary(tokenizer)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._room = threading.BoundedSemaphore(max_pending)

    @classmethod
    def load(cls, model: ModelFiles, *, num_threads: int = 2, max_pending: int = 1024) -> TextCodec:
        """Load a model's tokenizer and compile its template.

        Raises:  StartupError: if either is not valid.
        """
        path = model.folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise StartupError(f"{path} cannot be read: {error}") from error
        _name_special_tokens(tokenizer, model)
        _frame_text(tokenizer, model)
        source = model.chat_template
        template = None if source is None else ChatTemplate(source, model.special_tokens)
        return cls(
            tokenizer, chat_template=template, num_threads=num_threads, max_pending=max_pending
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether encode_chat works."""
        return self._chat_template is not None

    def close(self) -> None:
        """Stop the threads; jobs that have not begun are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str) -> list[int]:
        """Tokenize plain text, with the special tokens that the model frames text in.

        Raises:  QueueFull: if too many texts wait already.
        """
        return await self._run(lambda: self._encode(text, add_special_tokens=True))

    async def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokenize a conversation; its special tokens come from the template alone.

        Raises:
            InvalidArgument: if the template refuses it, or the model has none.
            QueueFull: if too many texts wait already.
        """
        template = self._chat_template
        if template is None:
            raise InvalidArgument("chat", "unset: the model has no chat template")
        return await self._run(
            lambda: self._encode(template.render(messages), add_special_tokens=False)
        )

    async def decode(self, token_ids: Sequence[int], *, keep_special: bool) -> str:
        """Give the text of token ids.

        Raises:  QueueFull: if too many texts wait already.
        """
        ids = list(token_ids)
        return await self._run(
            # decode() would hold the interpreter's lock, decode_batch() lets go of it
            lambda: self._tokenizer.decode_batch([ids], skip_special_tokens=not keep_special)[0]
        )

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # without offsets: half the time, the same ids
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded[0].ids
        return ids

    async def _run(self, job: Callable[[], T]) -> T:
        if not self._room.acquire(blocking=False):
            raise QueueFull("too many texts wait to be tokenized", _RETRY_SECONDS)
        try:
            future = self._threads.submit(job)
        except BaseException:
            self._room.release()
            raise
        future.add_done_callback(self._make_room)
        return await asyncio.wrap_future(future)

    def _make_room(self, _: Future[T]) -> None:
        self._room.release()


def _name_special_tokens(tokenizer: Tokenizer, model: ModelFiles) -> None:
    """Make the tokens that the configuration calls special so, as transformers does.

    Only those that the vocabulary has: the model knows no others.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    named = [
        token
        for token in model.special_tokens.values()
        if token not in special and tokenizer.token_to_id(token) is not None
    ]
    if named:
        tokenizer.add_special_tokens(named)


def _frame_text(tokenizer: Tokenizer, model: ModelFiles) -> None:
    """Frame plain text in begin and end tokens as tokenizer_config.json says.

    Where it says nothing, tokenizer.json's own post-processor stands, as in transformers.
    """
    if model.add_bos_token is None and model.add_eos_token is None:
        return
    bos = model.special_tokens.get("bos_token") if model.add_bos_token else None
    eos = model.special_tokens.get("eos_token") if model.add_eos_token else None
    frame = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None]
    known = [(token, token_id) for token, token_id in frame if token_id is not None]
    names = {token for token, _ in known}
    single = [bos] if bos in names else []
    tokenizer.post_processor = TemplateProcessing(
        single=[*single, "$A", *([eos] if eos in names else [])],
        special_tokens=list(dict.fromkeys(known)),
    )
