"""One choice's tokens, put together into text that ends where it should."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.text.detokenizer import Detokenizer, Vocabulary
from scheduler_svc.text.stop_strings import StopMatcher, StopStrings


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What a client wants of the text.

    Attributes:
        omit_text: deltas carry no text; stop strings work all the same.
        keep_special_tokens: leave special tokens in the text.
        stop: strings that end a choice.
        include_stop: leave what ended the choice in the text.
        min_tokens: stop strings are not looked for in the text of that many first tokens.
        continues_prompt: the text goes on after the prompt's, so that a leading space
            stays; a chat's reply is a text of its own.
    """

    omit_text: bool = False
    keep_special_tokens: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    continues_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Assembled:
    """What some tokens added to a choice.

    Attributes:
        text: that may be shown now.
        num_tokens: how many of the given tokens belong to the choice: those after the
            one that completed a stop string do not.
        stop: the stop string that ended the choice, if one did.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class TextAssembler:
    """Makes the choices of one request, which share vocabulary and stop strings."""

    def __init__(self, vocabulary: Vocabulary, options: TextOptions) -> None:
        """Prepare what the choices share."""
        self.vocabulary = vocabulary
        self.options = options
        self._stops = StopStrings(options.stop) if options.stop else None

    def choice(self) -> ChoiceAssembler:
        """Start a choice."""
        options = self.options
        if options.omit_text and self._stops is None:
            return ChoiceAssembler(self.vocabulary, options, None, None)
        detokenizer = self.vocabulary.detokenizer(
            keep_special=options.keep_special_tokens, continues=options.continues_prompt
        )
        matcher = None
        if self._stops is not None:
            matcher = StopMatcher(self._stops, include_stop=options.include_stop)
        return ChoiceAssembler(self.vocabulary, options, detokenizer, matcher)


class ChoiceAssembler:
    """One choice.

    Invariant: after any number of tokens, the text given so far depends on the tokens
    alone and not on how they were cut into calls. So a choice can be taken up again.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: TextOptions,
        detokenizer: Detokenizer | None,
        matcher: StopMatcher | None,
    ) -> None:
        """Start before the first token; without a detokenizer there is no text."""
        self._vocabulary = vocabulary
        self._options = options
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._num_tokens = 0

    def push(
        self, tokens: Sequence[int], *, stop_token_id: int | None = None, is_last: bool = False
    ) -> Assembled:
        """Add tokens.

        Args:
            tokens: new ones, in order.
            stop_token_id: the stop token that the last of them is, if it is one.
            is_last: no tokens follow; everything held back is given.
        """
        if self._detokenizer is None:
            self._num_tokens += len(tokens)
            return Assembled("", len(tokens))
        hidden_at = len(tokens) if self._is_hidden(stop_token_id) else 0
        texts: list[str] = []
        for count, token_id in enumerate(tokens, start=1):
            self._num_tokens += 1
            delta = "" if count == hidden_at else self._detokenizer.push(token_id)
            stop = self._show(delta, texts)
            if stop is not None:
                return self._assembled(texts, count, stop)
        stop = self._finish(texts) if is_last else None
        return self._assembled(texts, len(tokens), stop)

    def _is_hidden(self, stop_token_id: int | None) -> bool:
        """Whether the stop token's text is to be left out.

        The text of a special token is the detokenizer's matter already.
        """
        if stop_token_id is None or self._options.include_stop:
            return False
        return not self._vocabulary.is_special(stop_token_id)

    def _show(self, delta: str, texts: list[str]) -> str | None:
        stop = None
        if self._matcher is not None and delta and self._num_tokens > self._options.min_tokens:
            delta, stop = self._matcher.feed(delta)
        texts.append(delta)
        return stop

    def _finish(self, texts: list[str]) -> str | None:
        assert self._detokenizer is not None
        stop = self._show(self._detokenizer.flush(), texts)
        if stop is None and self._matcher is not None:
            texts.append(self._matcher.flush())
        return stop

    def _assembled(self, texts: list[str], num_tokens: int, stop: str | None) -> Assembled:
        return Assembled("" if self._options.omit_text else "".join(texts), num_tokens, stop)
