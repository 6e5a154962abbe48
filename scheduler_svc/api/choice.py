"""One choice of a request: what came from the engine, and what the client is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octavo.v1 import inference_pb2

from scheduler_svc.api import events
from scheduler_svc.core.request import FinishReason, PositionLogprobs, Request, SequenceOutput
from scheduler_svc.text.assembler import ChoiceAssembler


@dataclass(frozen=True, slots=True)
class Reporting:
    """What the client wants to be told of each token and of the whole.

    Attributes:
        logprobs: of each token.
        cumulative_logprob: of each choice.
        stop_token_ids: that are named as what ended a choice.
    """

    logprobs: bool = False
    cumulative_logprob: bool = False
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class End:
    """How a choice ended."""

    reason: FinishReason
    stop: str | None = None
    stop_token_id: int | None = None
    error: str = ""


class Choice:
    """One choice, from its first token to its one Finished.

    Invariants: `end` is set once, and with it the one Finished is given; no event comes
    after that. `num_tokens` counts resumed tokens too.
    """

    def __init__(self, index: int, assembler: ChoiceAssembler, reporting: Reporting) -> None:
        """Start before the first token."""
        self.index = index
        self.num_tokens = 0
        self.end: End | None = None
        self._assembler = assembler
        self._reporting = reporting
        # None: not known, since a token came without its log-probability
        self._logprob_sum: float | None = 0.0
        self._engine_logprob: float | None = None
        self._is_resumed = False

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log-probabilities; None if it is not known."""
        if self._logprob_sum is not None and self.num_tokens:
            return self._logprob_sum
        return None if self._is_resumed else self._engine_logprob

    def resume(
        self, tokens: Sequence[int], request: Request
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """Take in what the client has already; a Finished follows only if that was all.

        Whoever has the last token has the last text as well: both came in one delta.
        """
        if tokens:
            self._is_resumed = True
            self._logprob_sum = None
        for token_id in tokens:
            is_stop = token_id in request.stop_token_ids
            is_last = is_stop or self.num_tokens + 1 == request.max_tokens
            stop_token_id = token_id if is_stop else None
            piece = self._assembler.push([token_id], stop_token_id=stop_token_id, is_last=is_last)
            self.num_tokens += 1
            if piece.stop is not None:
                yield self._finish(End(FinishReason.STOP, stop=piece.stop))
            elif is_last:
                reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
                yield self._finish(End(reason, stop_token_id=stop_token_id))
            if self.end is not None:
                return

    def accept(self, output: SequenceOutput) -> Iterator[inference_pb2.GenerateResponse]:
        """Take what the engine made; nothing, if the choice has ended already."""
        if self.end is not None:
            return
        piece = self._assembler.push(
            output.tokens,
            stop_token_id=output.stop_token_id,
            is_last=output.finish is not None,
        )
        tokens = output.tokens[: piece.num_tokens]
        logprobs = None if output.logprobs is None else output.logprobs[: piece.num_tokens]
        self.num_tokens += len(tokens)
        self._add_logprobs(tokens, logprobs)
        self._engine_logprob = output.cumulative_logprob
        if tokens or piece.text:
            shown = logprobs if self._reporting.logprobs else None
            yield from events.deltas(self.index, piece.text, tokens, shown)
        if piece.stop is not None:
            yield self._finish(End(FinishReason.STOP, stop=piece.stop))
        elif output.finish is not None:
            yield self._finish(
                End(output.finish, stop_token_id=output.stop_token_id, error=output.error)
            )

    def accept_again(
        self, output: SequenceOutput, resumed: Sequence[int]
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """Take a whole choice after `resume` took in its first tokens."""
        assert output.tokens[: len(resumed)] == list(resumed)
        self._is_resumed = False  # the engine's sum covers all of it
        rest = len(resumed)
        logprobs = None if output.logprobs is None else output.logprobs[rest:]
        yield from self.accept(
            SequenceOutput(
                sample_index=self.index,
                tokens=output.tokens[rest:],
                logprobs=logprobs,
                finish=output.finish,
                stop_token_id=output.stop_token_id,
                cumulative_logprob=output.cumulative_logprob,
                error=output.error,
            )
        )

    def fail(self, reason: FinishReason, error: str) -> Iterator[inference_pb2.GenerateResponse]:
        """End the choice as it stands; nothing, if it has ended already."""
        if self.end is None:
            yield self._finish(End(reason, error=error))

    def _add_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[PositionLogprobs] | None
    ) -> None:
        if self._logprob_sum is None or not tokens:
            return
        if logprobs is None or len(logprobs) < len(tokens):
            self._logprob_sum = None
        else:
            self._logprob_sum += sum(entry.chosen.logprob for entry in logprobs)

    def _finish(self, end: End) -> inference_pb2.GenerateResponse:
        self.end = end
        reporting = self._reporting
        is_named = end.stop_token_id in reporting.stop_token_ids
        return events.finished(
            self.index,
            end.reason,
            self.num_tokens,
            stop=end.stop,
            stop_token_id=end.stop_token_id if is_named else None,
            cumulative_logprob=self.cumulative_logprob if reporting.cumulative_logprob else None,
            error=end.error,
        )
