"""What each token id stands for, asked of the scheduler once and then remembered."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo_client import AsyncClient

_MAX_IDS_PER_CALL = 4096  # the scheduler's bound


@dataclass(frozen=True, slots=True)
class Token:
    """The bytes of one token; a character may be split over several tokens.

    Attributes:
        raw: all of them.
        shown: those that it adds to a text without special tokens.
    """

    raw: bytes
    shown: bytes

    @property
    def text(self) -> str:
        r"""Its text, or "\xe2\x80" where the bytes are no whole characters."""
        try:
            return self.raw.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in self.raw)

    @property
    def is_text(self) -> bool:
        """Whether its bytes are whole characters."""
        try:
            self.raw.decode("utf-8")
        except UnicodeDecodeError:
            return False
        return True


class Vocabulary:
    """Tokens of one model by id.

    Invariant: holds ids that the scheduler named or took, so never more than the model's
    vocabulary has.
    """

    def __init__(self, client: AsyncClient, num_tokens: int) -> None:
        """`num_tokens`: ids are below it."""
        self._client = client
        self._num_tokens = num_tokens
        self._tokens: dict[int, Token] = {}
        self._fetching = asyncio.Lock()

    def __getitem__(self, token_id: int) -> Token:
        return self._tokens[token_id]

    async def fetch_all(self, api_key: str | None) -> None:
        """See to it that every id is known: nothing to wait for, once it was done.

        Before a request begins, not while it runs: a key that is revoked meanwhile must not
        cut what it was allowed to begin. Several may ask at once: one fetches, with its key,
        and if it fails the next one goes on where it was.

        Raises:
            OctavoError: one of the SDK's.
        """
        if len(self._tokens) == self._num_tokens:
            return
        async with self._fetching:
            await self.fetch(range(self._num_tokens), api_key)

    async def fetch(self, ids: Iterable[int], api_key: str | None) -> None:
        """See to it that these ids are known.

        Raises:
            OctavoError: one of the SDK's.
        """
        missing = list({each: None for each in ids if each not in self._tokens})
        for begin in range(0, len(missing), _MAX_IDS_PER_CALL):
            await self._learn(missing[begin : begin + _MAX_IDS_PER_CALL], api_key)

    async def _learn(self, ids: list[int], api_key: str | None) -> None:
        shown = dict(zip(ids, await self._ask(ids, api_key), strict=True))
        special = [token_id for token_id, own in shown.items() if not own]
        kept = await self._ask(special, api_key, keep=True) if special else ()
        raw = {**shown, **dict(zip(special, kept, strict=True))}
        self._tokens.update((each, Token(raw[each], shown[each])) for each in ids)

    async def _ask(
        self, ids: Sequence[int], api_key: str | None, *, keep: bool = False
    ) -> tuple[bytes, ...]:
        return await self._client.token_bytes(ids, keep_special_tokens=keep, api_key=api_key)


class Offsets:
    """Where each token of one choice begins in its text, in characters."""

    def __init__(self, *, keeps_special: bool) -> None:
        self._keeps_special = keeps_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._next = 0

    def advance(self, token: Token) -> int:
        """Go over a token; return the number of whole characters before it."""
        begin = self._next
        added = token.raw if self._keeps_special else token.shown
        self._next += len(self._decoder.decode(added))
        return begin
