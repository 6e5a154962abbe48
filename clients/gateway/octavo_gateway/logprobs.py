"""Log-probabilities in OpenAI's two forms, and in the one of vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from octavo_client import PositionLogprobs, TokenLogprob

from octavo_gateway.tokens import Offsets, Token

Lookup = Callable[[int], Token]
_LEAST = -9999.0  # JSON has no minus infinity; OpenAI writes this


def finite(logprob: float) -> float:
    """Give a log-probability that JSON can carry."""
    return max(logprob, _LEAST)


def prompt_positions(
    token_ids: Sequence[int], positions: Sequence[PositionLogprobs], *, is_first: bool = True
) -> list[PositionLogprobs | None]:
    """Mark what has none: the first token of a prompt follows nothing.

    Where a position is not known, what stands there is no log-probability of its token.
    `is_first` is false for a later part of a long prompt.
    """
    pairs = zip(token_ids, positions, strict=True)
    return [
        None if (is_first and index == 0) or position.chosen.token_id != token_id else position
        for index, (token_id, position) in enumerate(pairs)
    ]


def chat_entries(positions: Iterable[PositionLogprobs], look_up: Lookup) -> list[dict[str, Any]]:
    """Give choices[].logprobs.content of a chat."""
    return [
        {
            **_chat_token(position.chosen, look_up),
            "top_logprobs": [_chat_token(token, look_up) for token in position.top],
        }
        for position in positions
    ]


def _chat_token(token: TokenLogprob, look_up: Lookup) -> dict[str, Any]:
    known = look_up(token.token_id)
    return {
        "token": known.text,
        "logprob": finite(token.logprob),
        "bytes": list(known.raw),
    }


def completion_object(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    num_top: int,
    offsets: Offsets,
    look_up: Lookup,
) -> dict[str, Any]:
    """Give choices[].logprobs of a completion, for some tokens in order.

    Args:
        token_ids: the tokens.
        positions: theirs; None for one that has none.
        num_top: how many of the likeliest to show; the chosen one is always there.
        offsets: where the text stands; it goes on over these tokens.
        look_up: token id to token, for every id named.
    """
    tokens = [look_up(token_id) for token_id in token_ids]
    return {
        "text_offset": [offsets.advance(token) for token in tokens],
        "token_logprobs": [
            None if position is None else finite(position.chosen.logprob) for position in positions
        ],
        "tokens": [completion_token(token) for token in tokens],
        "top_logprobs": [_top(position, num_top, look_up) for position in positions],
    }


def completion_token(token: Token) -> str:
    """A token as a completion names it: what is no text is told apart by a prefix."""
    return token.text if token.is_text else f"bytes:{token.text}"


def _top(
    position: PositionLogprobs | None, num_top: int, look_up: Lookup
) -> dict[str, float] | None:
    if position is None:
        return None
    top: dict[str, float] = {}
    for token in (*position.top[:num_top], position.chosen):
        # Two tokens may have one text: the likelier, which comes first, stays.
        top.setdefault(completion_token(look_up(token.token_id)), finite(token.logprob))
    return top


def prompt_logprobs(
    positions: Iterable[PositionLogprobs | None], num_top: int, look_up: Lookup
) -> list[dict[str, Any] | None]:
    """Give the extension prompt_logprobs: by token id, with the rank where it is known."""
    return [
        None if position is None else _by_id(position, num_top, look_up) for position in positions
    ]


def _by_id(position: PositionLogprobs, num_top: int, look_up: Lookup) -> dict[str, Any]:
    ranked = [(token, rank) for rank, token in enumerate(position.top, start=1)]
    shown: list[tuple[TokenLogprob, int | None]] = [*ranked[:num_top]]
    ranks = {token.token_id: rank for token, rank in ranked}
    chosen = position.chosen
    if chosen.token_id not in {token.token_id for token, _ in shown}:
        shown.append((chosen, ranks.get(chosen.token_id)))
    return {
        str(token.token_id): {
            "logprob": finite(token.logprob),
            "rank": rank,
            "decoded_token": look_up(token.token_id).text,
        }
        for token, rank in shown
    }
