"""The default model, as it came out of its package: what a lossy conversion would break.

Its tokenizer is compared with an independent one: llama.cpp's two splitting rules and
textbook BPE over the same vocabulary.
"""

from __future__ import annotations

import json
import os
from functools import cache
from itertools import pairwise
from pathlib import Path

import jinja2
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from executor_svc.model_store import DEFAULT_MODEL, default_store, resolve

# Source: llama.cpp, src/llama-vocab.cpp, the pre-tokenizer named "smollm".
DIGIT = regex.compile(r"\p{N}")
WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
IM_START, IM_END = 1, 2


@cache
def folder() -> Path:
    return resolve(DEFAULT_MODEL, Path(os.environ.get("OCTAVO_MODEL_STORE", default_store())))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(folder() / "tokenizer.json"))


def read_json(name: str) -> dict:
    return json.loads((folder() / name).read_text(encoding="utf-8"))


class ReferenceTokenizer:
    """Splitting rules, then the lowest-ranked merge again and again."""

    def __init__(self) -> None:
        model = read_json("tokenizer.json")["model"]
        self.vocabulary = model["vocab"]
        pairs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
        self.ranks = {pair: rank for rank, pair in enumerate(pairs)}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        self.spelling = {byte: chr(byte) for byte in printable}
        hidden = [byte for byte in range(256) if byte not in self.spelling]
        self.spelling |= {byte: chr(256 + index) for index, byte in enumerate(hidden)}

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for stretch in self.around_digits(text):
            for word in WORDS.findall(stretch):
                ids += self.merge([self.spelling[byte] for byte in word.encode()])
        return ids

    def around_digits(self, text: str) -> list[str]:
        pieces, start = [], 0
        for match in DIGIT.finditer(text):
            pieces += [text[start : match.start()], match.group()]
            start = match.end()
        return [piece for piece in [*pieces, text[start:]] if piece]

    def merge(self, parts: list[str]) -> list[int]:
        # A byte that the vocabulary lacks is dropped first, there as here: what stood beside
        # it may merge.
        parts = [part for part in parts if part in self.vocabulary]
        while len(parts) > 1:
            ranked = [
                (self.ranks[pair], index)
                for index, pair in enumerate(pairwise(parts))
                if pair in self.ranks
            ]
            if not ranked:
                break
            _, index = min(ranked)
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
        return [self.vocabulary[part] for part in parts]


@cache
def reference() -> ReferenceTokenizer:
    return ReferenceTokenizer()


TEXTS = [
    "Once upon a time, in 1984, there were 42 geese.",
    "1.\n\n2.\n\n\n3.  4.   5",
    "def f(x):\n    return x[0:10] ** 2\n\n\nclass A:\n\tpass\n",
    "Straße, naïve café, Ünïcödé — “quotes” …",
    "日本語のテキスト、中文和한국어 ١٢٣ ½",
    "👩‍👩‍👧‍👦🇫🇷 emoji, zero-width and non breaking",
    "don't we'll I'D they've 'tis",
    "    leading and trailing    ",
    "\r\n\r\n\t\t x \x00 y",
    "a:\x16:b",
]


@pytest.mark.parametrize("text", TEXTS)
def test_known_texts_have_the_reference_ids(text):
    """Prose, lists, code and other scripts become the ids the model was trained on."""
    assert tokenizer().encode(text).ids == reference().encode(text)


# SmolLM2's vocabulary cannot write six control characters, nor U+40000 to U+BFFFF, where no
# character is assigned: these bytes have no token.
MISSING_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
# "<" could spell a marker.
characters = st.characters(exclude_characters="<", exclude_categories=["Cs"])
writable = characters.filter(lambda character: MISSING_BYTES.isdisjoint(character.encode()))


@settings(max_examples=150, deadline=None)
@given(st.text(characters, max_size=60))
def test_any_text_has_the_reference_ids(text):
    """No text is tokenized otherwise than by the rules."""
    assert tokenizer().encode(text).ids == reference().encode(text)


@settings(max_examples=150, deadline=None)
@given(st.text(writable, max_size=60))
def test_any_text_comes_back(text):
    """What the vocabulary can write is not changed on the way there and back."""
    ids = tokenizer().encode(text).ids
    assert tokenizer().decode(ids, skip_special_tokens=False) == text


@settings(max_examples=150, deadline=None)
@given(st.text(" \n\t0123456789.ab'", max_size=30))
def test_blanks_and_digits_have_the_reference_ids(text):
    """Where the splitting rules differ is where blanks meet digits."""
    assert tokenizer().encode(text).ids == reference().encode(text)


@pytest.mark.parametrize(
    ("token", "token_id"),
    [("<|endoftext|>", 0), ("<|im_start|>", IM_START), ("<|im_end|>", IM_END)],
)
def test_chat_markers_are_single_ids(token, token_id):
    """Written in the middle of a text, they are still one token each."""
    assert tokenizer().encode(f"a{token}b").ids[1:-1] == [token_id]
    assert tokenizer().decode([token_id], skip_special_tokens=False) == token
    assert tokenizer().decode([token_id]) == ""


def test_plain_text_gets_no_marker_of_its_own():
    """The model's own tokenizer adds neither bos nor eos."""
    assert not {0, IM_START, IM_END} & set(tokenizer().encode("hello").ids)


def test_generation_ends_at_the_end_of_the_turn():
    """A server that missed this would run to the length limit."""
    assert read_json("generation_config.json")["eos_token_id"] == IM_END


def test_the_chat_template_writes_chatml():
    """System line of the model's own, turns, and the opening of the answer."""
    text = (folder() / "chat_template.jinja").read_text(encoding="utf-8")
    turn = [{"role": "user", "content": "Hi"}]
    written = jinja2.Template(text).render(messages=turn, add_generation_prompt=True)
    assert written == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_configuration_is_smollm2s():
    """The sizes published for SmolLM2-135M."""
    config = read_json("config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    published = {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    assert {name: config[name] for name in published} == published
    rope = config.get("rope_parameters", config)
    assert rope["rope_theta"] == 100_000
