"""Stop strings, found across any borders between deltas.

One Aho-Corasick automaton per request walks the text character by character. The depth
of its state is the length of the longest tail of the text that may still become a stop
string: exactly that much is held back, so no part of a stop string is ever shown too
early and nothing waits longer than it must.

The first stop string to be *complete* wins; if several become complete at the same
character, the longest of them. This depends on the text alone, never on how it was cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of one request's stop strings; immutable, shared by its choices."""

    def __init__(self, strings: Sequence[str]) -> None:
        """Build the automaton in time linear in the total length of the strings."""
        self.next: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        self.fail: list[int] = [0]
        self.found: list[str | None] = [None]
        for string in strings:
            self._insert(string)
        self._link()
        self.first_characters = frozenset(self.next[0])

    def _insert(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.fail.append(0)
                self.found.append(None)
            state = self.next[state][character]
        self.found[state] = string

    def _link(self) -> None:
        """Point each state to its longest proper tail that is also a prefix."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self.next[state].items():
                queue.append(child)
                fallback = self.fail[state]
                while fallback and character not in self.next[fallback]:
                    fallback = self.fail[fallback]
                self.fail[child] = self.next[fallback].get(character, 0)
                if self.found[child] is None:
                    self.found[child] = self.found[self.fail[child]]

    def step(self, state: int, character: str) -> int:
        """Follow one character."""
        while state and character not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(character, 0)


class StopMatcher:
    """Where one choice stands in the automaton, and the text it holds back.

    Invariant: the held text is as long as the state is deep.
    """

    def __init__(self, strings: StopStrings, *, include_stop: bool = False) -> None:
        """Start before the first character."""
        self._strings = strings
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Take more text; give what may be shown, and the stop string if one is complete.

        After a match the rest of the delta is dropped and the matcher must not be used.
        """
        strings = self._strings
        if self._state == 0 and strings.first_characters.isdisjoint(delta):
            return delta, None
        state = self._state
        for position, character in enumerate(delta, start=1):
            state = strings.step(state, character)
            stop = strings.found[state]
            if stop is not None:
                text = self._held + delta[:position]
                return (text if self._include_stop else text[: -len(stop)]), stop
        text = self._held + delta
        shown = len(text) - strings.depth[state]
        self._state, self._held = state, text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """Give the held text: nothing follows that could complete a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
