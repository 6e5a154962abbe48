"""Tests of scheduler_svc.text.detokenizer."""

from __future__ import annotations

import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scheduler_svc.text.detokenizer import Vocabulary

# ids past the vocabulary stand for nothing; models have such padding
TOKENS = st.lists(st.integers(0, 340), max_size=40)
FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def stream(
    tokenizer: Tokenizer, tokens: list[int], *, keep: bool = False, continues: bool = False
) -> list[str]:
    detokenizer = Vocabulary(tokenizer).detokenizer(keep_special=keep, continues=continues)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@FIXTURE
@given(tokens=TOKENS, keep=st.booleans())
def test_deltas_concatenate_to_the_whole(
    any_tokenizer: Tokenizer, tokens: list[int], keep: bool
) -> None:
    """Whatever the tokens, the deltas join to what the tokenizer makes of all at once."""
    expected = any_tokenizer.decode(tokens, skip_special_tokens=not keep)
    assert "".join(stream(any_tokenizer, tokens, keep=keep)) == expected


@FIXTURE
@given(tokens=TOKENS, data=st.data())
def test_byte_runs_are_decided_late(
    byte_fallback_tokenizer: Tokenizer, tokens: list[int], data: st.DataObject
) -> None:
    """Sequences made of byte tokens join to the whole too, good and bad ones mixed."""
    encoded = data.draw(st.text(max_size=6)).encode()
    noise = data.draw(st.lists(st.integers(0, 255), max_size=2))
    run = [3 + byte for byte in [*encoded, *noise]]
    ids = [*tokens[:3], *run, *tokens[3:]]
    expected = byte_fallback_tokenizer.decode(ids)
    assert "".join(stream(byte_fallback_tokenizer, ids)) == expected


@FIXTURE
@given(tokens=TOKENS)
def test_every_emission_is_a_prefix_of_the_final_text(
    any_tokenizer: Tokenizer, tokens: list[int]
) -> None:
    """No delta shows a replacement character that the final text does not have there."""
    final = any_tokenizer.decode(tokens)
    shown = ""
    for delta in stream(any_tokenizer, tokens):
        shown += delta
        assert final.startswith(shown)


@FIXTURE
@given(text=st.text(max_size=30))
def test_split_characters_wait_for_their_last_byte(
    byte_level_tokenizer: Tokenizer, text: str
) -> None:
    """A delta never holds part of a character: valid text streams without U+FFFD."""
    tokens = byte_level_tokenizer.encode(text).ids
    deltas = stream(byte_level_tokenizer, tokens, keep=True)
    assert "".join(deltas) == text


def test_a_character_comes_with_the_token_that_completes_it(
    byte_level_tokenizer: Tokenizer,
) -> None:
    """Text is held no longer than its character is incomplete."""
    emoji = [byte_level_tokenizer.token_to_id(token) for token in "ðŁĺĦ"]
    plain = byte_level_tokenizer.token_to_id("x")
    assert stream(byte_level_tokenizer, [*emoji, plain]) == ["", "", "", "😄", "x", ""]


def test_spaces_are_stripped_over_token_borders(any_tokenizer: Tokenizer) -> None:
    """What the beginning of a text loses may be spread over several tokens."""
    names = ["▁", "▁", "▁hello"] if any_tokenizer.token_to_id("▁hello") else ["Ġ", "Ġ", "h"]
    tokens = [any_tokenizer.token_to_id(name) for name in names]
    assert "".join(stream(any_tokenizer, tokens)) == any_tokenizer.decode(tokens)


@FIXTURE
@given(text=st.text(max_size=10))
def test_characters_join_under_any_decoder(any_tokenizer: Tokenizer, text: str) -> None:
    """Real text, whose characters are cut anywhere, streams to the whole."""
    tokens = any_tokenizer.encode(text).ids
    assert "".join(stream(any_tokenizer, tokens)) == any_tokenizer.decode(tokens)


def test_a_leading_space_is_stripped_only_at_the_beginning(
    byte_fallback_tokenizer: Tokenizer,
) -> None:
    """A text of its own loses the space that the tokenizer put there; a continuation
    keeps it, so that prompt and text join.
    """
    hello, world = (byte_fallback_tokenizer.token_to_id(name) for name in ("▁hello", "▁world"))
    assert "".join(stream(byte_fallback_tokenizer, [hello, world])) == "hello world"
    prompt = byte_fallback_tokenizer.decode([hello])
    text = "".join(stream(byte_fallback_tokenizer, [world], continues=True))
    assert prompt + text == byte_fallback_tokenizer.decode([hello, world])


def test_special_tokens_before_the_first_word_do_not_end_the_beginning(
    byte_fallback_tokenizer: Tokenizer,
) -> None:
    """A begin-of-sequence token that is not shown leaves the strip to the first word."""
    ids = [1, byte_fallback_tokenizer.token_to_id("▁hello")]
    assert "".join(stream(byte_fallback_tokenizer, ids)) == "hello"


def test_a_token_of_part_of_a_character_has_its_bytes(byte_level_tokenizer: Tokenizer) -> None:
    """The bytes of a text's tokens join to the text, where no token alone is a character."""
    vocabulary = Vocabulary(byte_level_tokenizer)
    ids = byte_level_tokenizer.encode("𓂀 naïve").ids
    parts = [vocabulary.token_bytes(token_id, keep_special=False) for token_id in ids]
    assert b"".join(parts) == "𓂀 naïve".encode()
    assert parts[0] == b"\xf0"
    end = byte_level_tokenizer.token_to_id("<|end|>")
    assert vocabulary.token_bytes(end, keep_special=False) == b""
    assert vocabulary.token_bytes(end, keep_special=True) == b"<|end|>"


def test_a_piece_has_the_bytes_that_it_adds_after_others(
    byte_fallback_tokenizer: Tokenizer,
) -> None:
    """A word's own space is part of it, and a byte token is its one byte."""
    vocabulary = Vocabulary(byte_fallback_tokenizer)

    def bytes_of(token: str) -> bytes:
        token_id = byte_fallback_tokenizer.token_to_id(token)
        return vocabulary.token_bytes(token_id, keep_special=False)

    assert bytes_of("▁hello") == b" hello"
    assert bytes_of("<0xE2>") == b"\xe2"
    assert bytes_of("東") == "東".encode()


def test_special_tokens_are_known(byte_level_tokenizer: Tokenizer) -> None:
    """Only tokens that the tokenizer calls special are."""
    vocabulary = Vocabulary(byte_level_tokenizer)
    tool = byte_level_tokenizer.token_to_id("<tool>")
    assert vocabulary.is_special(0)
    assert not vocabulary.is_special(tool)
    assert not vocabulary.is_special(10_000)


def test_cost_per_token_does_not_grow(any_tokenizer: Tokenizer) -> None:
    """Ten times the tokens take about ten times as long, byte runs included."""

    def seconds(length: int) -> float:
        tokens = [3 + 0xC3, 3 + 0xA9] * (length // 2)
        begin = time.perf_counter()
        stream(any_tokenizer, tokens)
        return time.perf_counter() - begin

    seconds(1000)
    short = min(seconds(3000) for _ in range(3))
    assert seconds(30_000) < 40 * short  # quadratic growth would be 100 times
