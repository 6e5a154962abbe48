"""Small tokenizers of each kind that models use, made here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer

CORPUS = ["hello world the quick brown fox jumps over the lazy dog", "naïve café 東京 😀"] * 10


def byte_level(decoder: decoders.Decoder | None = None) -> Tokenizer:
    """GPT-2's kind: tokens are bytes; ids 0 and 1 are special, 2 is an ordinary addition."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder or decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("né", special=False)])
    return tokenizer


def _pieces(decoder: decoders.Decoder | None) -> Tokenizer:
    words = [
        "▁",
        "▁hello",
        "▁world",
        "h",
        "e",
        "l",
        "o",
        "a",
        "é",
        "東",
        "▁▁",
        "lo</w>",
        "##s",
        ".",
    ]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: pieces, byte-fallback runs, one leading space stripped."""
    return _pieces(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "byte_fallback_unstripped": lambda: _pieces(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    ),
    "two_spaces_stripped": lambda: _pieces(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)])
    ),
    "byte_level_stripped": lambda: byte_level(
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    ),
    "metaspace": lambda: _pieces(decoders.Metaspace()),
    "word_piece": lambda: _pieces(decoders.WordPiece()),
    "suffix": lambda: _pieces(decoders.BPEDecoder()),
    "no_decoder": lambda: _pieces(None),
}
_MADE = {name: make() for name, make in KINDS.items()}


@pytest.fixture(params=sorted(KINDS))
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return _MADE[request.param]


@pytest.fixture
def byte_level_tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture
def byte_fallback_tokenizer() -> Tokenizer:
    return byte_fallback()
