"""Tests of scheduler_svc.text.assembler."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scheduler_svc.text.assembler import ChoiceAssembler, TextAssembler, TextOptions
from scheduler_svc.text.detokenizer import Vocabulary


def choice(tokenizer: Tokenizer, **options: object) -> ChoiceAssembler:
    return TextAssembler(Vocabulary(tokenizer), TextOptions(**options)).choice()  # type: ignore[arg-type]  # by the names of TextOptions


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per character, so that every border is a token border."""
    return [tokenizer.token_to_id("Ġ" if character == " " else character) for character in text]


def test_a_stop_string_over_token_borders_never_leaks(byte_level_tokenizer: Tokenizer) -> None:
    """Tokens that may begin a stop string bring no text until that is decided."""
    assembler = choice(byte_level_tokenizer, stop=("dog",))
    pieces = [assembler.push([token]) for token in ids(byte_level_tokenizer, "a do dog")]
    assert [piece.text for piece in pieces] == ["a", " ", "", "", "do ", "", "", ""]
    assert [piece.stop for piece in pieces] == [None] * 7 + ["dog"]


def test_tokens_after_a_stop_string_do_not_belong_to_the_choice(
    byte_level_tokenizer: Tokenizer,
) -> None:
    """When several tokens come at once, those after the completing one are cut off."""
    assembler = choice(byte_level_tokenizer, stop=("dog",))
    piece = assembler.push(ids(byte_level_tokenizer, "a dog ran"))
    assert (piece.text, piece.num_tokens, piece.stop) == ("a ", 5, "dog")


def test_stop_strings_work_without_text(byte_level_tokenizer: Tokenizer) -> None:
    """A client that omits text still gets its stop."""
    assembler = choice(byte_level_tokenizer, stop=("dog",), omit_text=True)
    piece = assembler.push(ids(byte_level_tokenizer, "a dog ran"))
    assert (piece.text, piece.num_tokens, piece.stop) == ("", 5, "dog")


def test_the_end_flushes_what_was_held(byte_level_tokenizer: Tokenizer) -> None:
    """The beginning of a stop string that never came is text after all."""
    assembler = choice(byte_level_tokenizer, stop=("dog",))
    assert assembler.push(ids(byte_level_tokenizer, "a do")).text == "a "
    assert assembler.push([], is_last=True).text == "do"


def test_a_special_stop_token_shows_only_when_kept(byte_level_tokenizer: Tokenizer) -> None:
    """<|end|> is text only with keep_special_tokens."""
    tokens = [*ids(byte_level_tokenizer, "a"), 0]
    hidden = choice(byte_level_tokenizer)
    kept = choice(byte_level_tokenizer, keep_special_tokens=True)
    assert hidden.push(tokens, stop_token_id=0, is_last=True).text == "a"
    assert kept.push(tokens, stop_token_id=0, is_last=True).text == "a<|end|>"


def test_an_ordinary_stop_token_shows_only_with_include_stop(
    byte_level_tokenizer: Tokenizer,
) -> None:
    """A stop token id is left out as a stop string is, and left in as one is."""
    tokens = ids(byte_level_tokenizer, "ab")
    plain = choice(byte_level_tokenizer)
    including = choice(byte_level_tokenizer, include_stop=True)
    assert plain.push(tokens, stop_token_id=tokens[-1], is_last=True).text == "a"
    assert including.push(tokens, stop_token_id=tokens[-1], is_last=True).text == "ab"


def test_min_tokens_hold_back_stop_strings(byte_level_tokenizer: Tokenizer) -> None:
    """A stop string in the first min_tokens tokens does not count, a later one does."""
    assembler = choice(byte_level_tokenizer, stop=("b",), min_tokens=3)
    piece = assembler.push(ids(byte_level_tokenizer, "abcab"))
    assert (piece.text, piece.stop) == ("abca", "b")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    tokens=st.lists(st.integers(3, 269), max_size=30),
    borders=st.lists(st.integers(0, 30), max_size=6),
    at=st.integers(0, 30),
    stop=st.sampled_from([(), ("o",), ("hello w", "e"), ("\ufffd",)]),
)
def test_a_choice_taken_up_again_goes_on_exactly(
    any_tokenizer: Tokenizer,
    tokens: list[int],
    borders: list[int],
    at: int,
    stop: tuple[str, ...],
) -> None:
    """Text before a break and text after it, by an assembler that was only fed the
    tokens, join to the text of an unbroken choice, however the tokens were cut.
    """
    whole = choice(any_tokenizer, stop=stop).push(tokens, is_last=True)
    first = choice(any_tokenizer, stop=stop)
    before = ""
    cuts = sorted({0, *(border for border in borders if border < at), min(at, len(tokens))})
    for begin, end in itertools.pairwise(cuts):
        piece = first.push(tokens[begin:end])
        before += piece.text
        if piece.stop is not None:
            assert (before, piece.stop) == (whole.text, whole.stop)
            return
    second = choice(any_tokenizer, stop=stop)
    second.push(tokens[:at])
    piece = second.push(tokens[at:], is_last=True)
    assert (before + piece.text, piece.stop) == (whole.text, whole.stop)
