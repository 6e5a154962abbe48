"""Tests of octavo_gateway.logprobs and .tokens."""

from __future__ import annotations

import math

from octavo_client import PositionLogprobs, TokenLogprob
from octavo_gateway import logprobs
from octavo_gateway.tokens import Offsets, Token


def token(raw: bytes, shown: bytes | None = None) -> Token:
    return Token(raw, raw if shown is None else shown)


# 4 and 5 are the two halves of one character; 6 has the text of 1.
TOKENS = {
    0: token(b"<|end|>", b""),
    1: token(b"he"),
    2: token(b"llo"),
    3: token("é".encode()),
    4: token(b"\xf0\x9f"),
    5: token(b"\x98\x80!"),
    6: token(b"he"),
}
NOTHING = PositionLogprobs(TokenLogprob(0, 0.0))  # how an unset position arrives


def position(chosen: int, logprob: float, *top: tuple[int, float]) -> PositionLogprobs:
    return PositionLogprobs(
        TokenLogprob(chosen, logprob), tuple(TokenLogprob(*entry) for entry in top)
    )


def look_up(token_id: int) -> Token:
    return TOKENS[token_id]


def test_a_chats_tokens_have_bytes() -> None:
    """Half a character has its bytes, and escapes instead of a text."""
    entries = logprobs.chat_entries([position(4, -0.5, (4, -0.5), (3, -1.0))], look_up)
    assert entries == [
        {
            "token": "\\xf0\\x9f",
            "logprob": -0.5,
            "bytes": [0xF0, 0x9F],
            "top_logprobs": [
                {"token": "\\xf0\\x9f", "logprob": -0.5, "bytes": [0xF0, 0x9F]},
                {"token": "é", "logprob": -1.0, "bytes": [0xC3, 0xA9]},
            ],
        }
    ]


def test_a_completions_object_is_four_lists() -> None:
    """The chosen token is among the likeliest even where it is none of them."""
    shown = logprobs.completion_object(
        [1, 2], [None, position(2, -3.0, (1, -0.1))], 1, Offsets(keeps_special=False), look_up
    )
    assert shown == {
        "text_offset": [0, 2],
        "token_logprobs": [None, -3.0],
        "tokens": ["he", "llo"],
        "top_logprobs": [None, {"he": -0.1, "llo": -3.0}],
    }


def test_greedy_tokens_are_the_maximum_of_their_position() -> None:
    """Scorers compare the chosen token's value with the greatest, so texts must not clash."""
    shown = logprobs.completion_object(
        [6], [position(6, -0.25, (6, -0.25), (1, -2.0))], 2, Offsets(keeps_special=False), look_up
    )
    assert max(shown["top_logprobs"][0].values()) == shown["token_logprobs"][0]


def test_only_as_many_as_asked_for_are_shown() -> None:
    """Others may have been fetched for prompt_logprobs."""
    shown = logprobs.completion_object(
        [1],
        [position(1, -0.1, (1, -0.1), (2, -1.0), (3, -2.0))],
        1,
        Offsets(keeps_special=False),
        look_up,
    )
    assert shown["top_logprobs"] == [{"he": -0.1}]


def test_offsets_count_whole_characters_of_the_text() -> None:
    """Both halves of a character begin where it does; what is not in the text has no length."""
    text = "heé😀!"
    ids = [1, 3, 0, 4, 5, 2]
    for keeps_special, offsets in ((False, [0, 2, 3, 3, 3, 5]), (True, [0, 2, 3, 10, 10, 12])):
        counter = Offsets(keeps_special=keeps_special)
        assert [counter.advance(look_up(each)) for each in ids] == offsets
    assert text.index("😀") == 3
    assert len(text) == 5


def test_halves_of_characters_are_told_apart_from_texts() -> None:
    """A completion's keys are strings, so bytes need a prefix."""
    assert logprobs.completion_token(look_up(4)) == "bytes:\\xf0\\x9f"
    assert logprobs.completion_token(look_up(3)) == "é"


def test_json_carries_the_impossible() -> None:
    """A token that cannot be drawn has OpenAI's number for minus infinity."""
    entries = logprobs.chat_entries([position(1, -math.inf)], look_up)
    assert entries[0]["logprob"] == -9999.0


def test_the_first_token_of_a_prompt_has_none() -> None:
    """It follows nothing; a later part of the prompt does."""
    both = [NOTHING, position(2, -1.0)]
    assert logprobs.prompt_positions([0, 2], both) == [None, both[1]]
    assert logprobs.prompt_positions([2, 2], [both[1], both[1]], is_first=False) == [both[1]] * 2
    assert logprobs.prompt_positions([1, 2, 1], [NOTHING, both[1], NOTHING])[2] is None


def test_prompt_logprobs_are_by_token_id() -> None:
    """With its rank where it is known: one that is not among those asked for has none."""
    shown = logprobs.prompt_logprobs(
        [None, position(3, -4.0, (1, -0.1), (2, -1.0)), position(2, -1.0, (1, -0.1), (2, -1.0))],
        1,
        look_up,
    )
    he = {"logprob": -0.1, "rank": 1, "decoded_token": "he"}
    assert shown == [
        None,
        {"1": he, "3": {"logprob": -4.0, "rank": None, "decoded_token": "é"}},
        {"1": he, "2": {"logprob": -1.0, "rank": 2, "decoded_token": "llo"}},
    ]
