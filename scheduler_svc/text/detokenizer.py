r"""Tokens to text, one at a time.

The deltas of a choice concatenate to exactly what the tokenizer makes of all its tokens
at once, whatever the tokens are and however they come; what the tokenizer only decides
later (an unfinished character, an unfinished run of byte tokens) is held back until then.
Each token costs O(1), amortised.

Two kinds of tokenizer need two ways:

* Byte-level (GPT-2, Llama 3, Qwen, SmolLM): each token is a string of bytes, and the text
  is their UTF-8. An incremental UTF-8 decoder does it.
* Pieces (Llama 2, Mistral, Gemma, ...): each token is a string, and the tokenizer's
  decoder is a chain of rules that each look at one token and at whether it is the first
  or last. So a token's text is what it adds between two anchors. Byte-fallback tokens
  (`<0xE2>`) are the exception: a run of them is one unit, since one bad byte turns the
  whole run into replacement characters. A run ends with the next other token.
"""

from __future__ import annotations

import codecs
import json
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

_ANCHOR = "a"
_REPLACEMENT = "\ufffd"
_MAX_GROUP = 64  # of tokens that make no character together; past it nothing more is joined


class Detokenizer(Protocol):
    """The text of one choice in the making."""

    def push(self, token_id: int) -> str:
        """Add a token; give the text that is now certain."""

    def flush(self) -> str:
        """Give the rest: no token follows."""


class Vocabulary:
    """What the tokens of one tokenizer stand for; shared by all choices.

    Text is built as `tokenizers` does it: ids without a token are passed over, and so are
    special tokens unless they are asked for.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Find out which kind of decoder the tokenizer has."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        kinds = decoder_kinds(tokenizer)
        self._is_byte_level = "ByteLevel" in kinds and set(kinds) <= {"ByteLevel", "Fuse"}
        self._bytes: dict[tuple[int, bool], bytes] = {}
        self._pieces = _Pieces(tokenizer, kinds)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a special one, such as <|im_end|>."""
        return self._tokenizer.id_to_token(token_id) in self._special

    def token(self, token_id: int, *, keep_special: bool) -> str | None:
        """Give a token's own string, or None if it adds nothing to the text."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None or (not keep_special and token in self._special):
            return None
        return token

    def token_bytes(self, token_id: int, *, keep_special: bool) -> bytes:
        """Give the bytes that a token adds to a text after other tokens."""
        key = (token_id, keep_special)
        found = self._bytes.get(key)
        if found is None:
            token = self.token(token_id, keep_special=keep_special)
            to_bytes = _to_bytes if self._is_byte_level else self._pieces.bytes_of
            found = self._bytes[key] = b"" if token is None else to_bytes(token)
        return found

    def detokenizer(self, *, keep_special: bool, continues: bool) -> Detokenizer:
        """Start a choice.

        Args:
            keep_special: leave special tokens in the text.
            continues: the text goes on after other text, so that a leading space that
                the tokenizer strips at the beginning of a text stays.
        """
        if self._is_byte_level:
            return _ByteDetokenizer(self, keep_special)
        return _PieceDetokenizer(self, self._pieces, keep_special, continues)


def decoder_kinds(tokenizer: Tokenizer) -> list[str]:
    """List the types of a tokenizer's decoders, in order."""
    decoder: dict[str, Any] | None = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return []
    chain = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [entry["type"] for entry in chain]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map of printable characters to bytes.

    Source:  bytes_to_unicode in the GPT-2 code: printable Latin-1 stands for itself, the
        other bytes in order for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    """A token's bytes; one with a character outside the alphabet stands for itself."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


class _ByteDetokenizer:
    def __init__(self, vocabulary: Vocabulary, keep_special: bool) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._keep_special = keep_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id, keep_special=self._keep_special))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Text(NamedTuple):
    """What tokens add to a text: for certain, if more tokens follow, if none do."""

    sure: str
    if_followed: str = ""
    if_last: str = ""


class _Pieces:
    """What groups of tokens add to a text, by the tokenizer's own decoder."""

    def __init__(self, tokenizer: Tokenizer, kinds: list[str]) -> None:
        decoder = tokenizer.decoder
        self._decode = " ".join if decoder is None else decoder.decode
        self.has_byte_fallback = "ByteFallback" in kinds
        self.splits_characters = "ByteLevel" in kinds
        self._anchor_length = len(self._decode([_ANCHOR, _ANCHOR])) - 1
        self._cache: dict[str, _Text] = {}

    def one(self, token: str) -> _Text:
        """Text of one token after others."""
        found = self._cache.get(token)
        if found is None:
            found = self._cache[token] = self.text_of([token], first=False)
        return found

    def bytes_of(self, token: str) -> bytes:
        """Bytes of one token between others."""
        if self.is_byte(token):
            return bytes.fromhex(token[3:5])
        found = self.one(token)
        return (found.sure + found.if_followed).encode()

    def is_byte(self, token: str) -> bool:
        """Whether a token stands for one byte, as <0xE2> does."""
        return (
            self.has_byte_fallback
            and len(token) == 6
            and token.startswith("<0x")
            and token.endswith(">")
        )

    def text_of(self, tokens: list[str], *, first: bool) -> _Text:
        """Text of tokens at the beginning of everything, or after other tokens."""
        before = [] if first else [_ANCHOR]
        last = self._decode([*before, *tokens])[len(before) :]
        middle = self._decode([*before, *tokens, _ANCHOR])[len(before) : -self._anchor_length]
        if last == middle:
            return _Text(last)
        pairs = enumerate(zip(last, middle, strict=False))
        common = next((at for at, (a, b) in pairs if a != b), min(len(last), len(middle)))
        return _Text(last[:common], middle[common:], last[common:])


class _PieceDetokenizer:
    """Invariant: `_group` holds the tokens whose text is not decided; `_owed` is what the
    decided ones still add, depending on what follows.
    """

    def __init__(
        self, vocabulary: Vocabulary, pieces: _Pieces, keep_special: bool, continues: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._pieces = pieces
        self._keep_special = keep_special
        self._started = continues
        self._group: list[str] = []
        self._owed = _Text("")

    def push(self, token_id: int) -> str:
        token = self._vocabulary.token(token_id, keep_special=self._keep_special)
        if token is None:
            return ""
        is_open = self._pieces.is_byte(token)
        if self._started and not self._group and not is_open:
            found = self._pieces.one(token)
        else:
            self._group.append(token)
            if is_open:
                return ""
            found = self._pieces.text_of(self._group, first=not self._started)
        if self._is_undecided(found):
            self._group = self._group or [token]
            return ""
        self._started, self._group = True, []
        text = self._owed.if_followed + found.sure
        self._owed = found
        return text

    def flush(self) -> str:
        if not self._group:
            return self._owed.if_last
        found = self._pieces.text_of(self._group, first=not self._started)
        return self._owed.if_followed + found.sure + found.if_last

    def _is_undecided(self, found: _Text) -> bool:
        """Whether the next token may change the text of the group.

        Until there is any text, what the tokenizer strips at the start is not known.
        """
        if not self._started and not (found.sure or found.if_followed):
            return True
        is_cut = self._pieces.splits_characters and found.sure.endswith(_REPLACEMENT)
        return is_cut and len(self._group) < _MAX_GROUP
