"""Tests of scheduler_svc.text.stop_strings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.text.stop_strings import StopMatcher, StopStrings

STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)
TEXT = st.text("abcx", max_size=40)


def run(
    stops: list[str], deltas: list[str], *, include: bool = False
) -> tuple[list[str], str | None]:
    matcher = StopMatcher(StopStrings(stops), include_stop=include)
    shown = []
    for delta in deltas:
        text, stop = matcher.feed(delta)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.flush()], None


def by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """The text before the first stop string to be complete; the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def cut(text: str, at: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(place for place in at if place < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@given(STOPS, TEXT, st.lists(st.integers(0, 40), max_size=10))
def test_any_split_gives_the_definition(stops: list[str], text: str, at: list[int]) -> None:
    """However the text is cut, it ends before the first complete stop string."""
    shown, stop = run(stops, cut(text, at))
    assert ("".join(shown), stop) == by_definition(stops, text)


@given(STOPS, TEXT, st.lists(st.integers(0, 40), max_size=10))
def test_include_stop_ends_right_after_it(stops: list[str], text: str, at: list[int]) -> None:
    """With include_stop the text ends with the stop string, and only then differs."""
    shown, stop = run(stops, cut(text, at), include=True)
    before, expected = by_definition(stops, text)
    assert ("".join(shown), stop) == (before + (expected or ""), expected)


@given(STOPS, TEXT)
def test_no_more_is_held_than_may_become_a_stop(stops: list[str], text: str) -> None:
    """After each character exactly the longest tail that begins a stop string waits."""
    matcher = StopMatcher(StopStrings(stops))
    shown = ""
    for position, character in enumerate(text, start=1):
        delta, stop = matcher.feed(character)
        shown += delta
        if stop is not None:
            return
        seen = text[:position]
        tails = (seen[start:] for start in range(position + 1))
        held = next(tail for tail in tails if any(stop.startswith(tail) for stop in stops))
        assert shown + held == seen


@pytest.mark.parametrize(
    ("stops", "deltas", "expected"),
    [
        (["\n\nUser:"], ["Hi", "\n", "\nUs", "er: x"], ("Hi", "\n\nUser:")),
        (["\n\nUser:"], ["Hi\n", "\nUse", " it"], ("Hi\n\nUse it", None)),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["c", "bcd"], ["abcd"], ("ab", "c")),
        (["c", "bc"], ["abcd"], ("a", "bc")),
        (["."], [".", "x"], ("", ".")),
        (["END"], ["the EN"], ("the EN", None)),
    ],
)
def test_examples(stops: list[str], deltas: list[str], expected: tuple[str, str | None]) -> None:
    """Borders, false beginnings, overlaps and texts that end early."""
    shown, stop = run(stops, deltas)
    assert ("".join(shown), stop) == expected
