"""One Generate call: from the engine's outputs to the events of its stream, in order.

Plain synchronous code. Events gather in an outbox that the servicer empties at the
client's pace; what is not yet sent when something fails is still sent before the error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from octavo.v1 import inference_pb2

from scheduler_svc.api import events
from scheduler_svc.api.choice import Choice, Reporting
from scheduler_svc.api.ports import RequestStats
from scheduler_svc.api.validation import Validated
from scheduler_svc.core.request import FinishReason, PositionLogprobs, SequenceOutput
from scheduler_svc.errors import InvalidArgument
from scheduler_svc.text.assembler import TextAssembler

Stop = Callable[[int], None]
"""Tells the engine that a sequence needs no more tokens."""


class Generation:
    """The stream of one request.

    Invariant: each of the n choices gets exactly one Finished, and `is_done` is true from
    the last of them on.
    """

    def __init__(
        self, validated: Validated, assembler: TextAssembler, prompt_text: str, model: str
    ) -> None:
        """Take in what the client has already; no event is due before `open`.

        `prompt_text` is what echo shows, `model` the name that the client is told.
        """
        self.request = validated.request
        self.outbox: deque[inference_pb2.GenerateResponse] = deque()
        self._response = response = validated.response
        self._model = model
        reporting = Reporting(
            logprobs=response.num_logprobs is not None,
            cumulative_logprob=response.is_ranked or response.num_logprobs is not None,
            stop_token_ids=response.stop_token_ids,
        )
        self.choices = [Choice(index, assembler.choice(), reporting) for index in range(response.n)]
        self._ranking = None
        if response.is_ranked:
            self._ranking = _Ranking(
                [
                    _Candidate(Choice(index, assembler.choice(), Reporting()))
                    for index in range(response.num_sequences)
                ],
                is_ordered=self.request.beam is not None,
            )
        self._prompt = _PromptDeltas(validated, prompt_text, self.outbox)
        self._resumed: list[inference_pb2.GenerateResponse] = []
        for index, tokens in response.resumed.items():
            self._resumed += self.choices[index].resume(tokens, self.request)
        self.needs_engine = validated.needs_model and not self.is_done

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.end is not None for choice in self.choices)

    def open(self, stop: Stop) -> None:
        """Emit Started, the prompt where it is due, and what ended before it began."""
        request = self.request
        started = inference_pb2.Started(
            request_id=request.request_id,
            model=self._model,
            num_prompt_tokens=len(request.prompt_tokens),
            seed=request.sampling.seed,
            max_tokens=request.max_tokens,
        )
        self.outbox.append(inference_pb2.GenerateResponse(started=started))
        self._prompt.open()
        self.outbox += self._resumed
        if not self.needs_engine:
            self._finish_all(FinishReason.LENGTH, "")
        elif self._ranking is None:
            for choice in self.choices:
                if choice.end is not None:
                    stop(choice.index)

    def accept(self, outputs: Iterable[SequenceOutput], stop: Stop) -> None:
        """Emit what outputs add, and stop the sequences that need no more."""
        outputs = list(outputs)
        for output in outputs:
            self._prompt.add(output)
        for output in outputs:
            if output.tokens or output.finish is not None:
                self._prompt.close()
            choice = self._sequence(output.sample_index)
            was_running = choice.end is None
            if self._ranking is None:
                for event in choice.accept(output):
                    self.outbox.append(event)
            else:
                self._ranking.candidates[output.sample_index].accept(output)
            if was_running and choice.end is not None and output.finish is None:
                stop(output.sample_index)
        if self._ranking is not None and self._ranking.is_done and not self.is_done:
            self._release(self._ranking)

    def fail(self, reason: FinishReason, error: str) -> None:
        """End every choice that has not ended."""
        self._finish_all(reason, error)

    def close(self, stats: RequestStats | None) -> None:
        """Emit Usage; without an engine there are no times to tell."""
        usage = inference_pb2.Usage(
            num_prompt_tokens=len(self.request.prompt_tokens),
            num_completion_tokens=self.num_completion_tokens,
        )
        if stats is not None:
            usage.cached_prompt_tokens = stats.cached_prompt_tokens
            usage.num_preemptions = stats.num_preemptions
            usage.queue_seconds = stats.queue_seconds
            usage.first_token_seconds = stats.first_token_seconds
            usage.total_seconds = stats.total_seconds
        self.outbox.append(inference_pb2.GenerateResponse(usage=usage))

    @property
    def num_completion_tokens(self) -> int:
        """Tokens of all choices that were generated, shown or not."""
        if self._ranking is not None and self.needs_engine:
            return sum(candidate.choice.num_tokens for candidate in self._ranking.candidates)
        return sum(choice.num_tokens for choice in self.choices)

    def _sequence(self, index: int) -> Choice:
        if self._ranking is not None:
            return self._ranking.candidates[index].choice
        return self.choices[index]

    def _finish_all(self, reason: FinishReason, error: str) -> None:
        for choice in self.choices:
            self.outbox += choice.fail(reason, error)

    def _release(self, ranking: _Ranking) -> None:
        """Emit the best choices.

        Raises:  InvalidArgument: if the client resumes with tokens of other choices.
        """
        best = ranking.best(self._response.n)
        resumed = self._response.resumed
        for index, tokens in resumed.items():
            if tuple(best[index].tokens[: len(tokens)]) != tokens:
                raise InvalidArgument("resume", "tokens that this very request, seed and all, gave")
        for choice, output in zip(self.choices, best, strict=True):
            tokens = resumed.get(choice.index, ())
            for event in choice.accept_again(output, tokens):
                self.outbox.append(event)


@dataclass(slots=True)
class _Candidate:
    """A sequence that is shown at its end, if at all.

    Its choice's events are not shown; it follows the text to find stop strings in time.
    """

    choice: Choice
    tokens: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = field(default_factory=list)

    def accept(self, output: SequenceOutput) -> None:
        deque(self.choice.accept(output), maxlen=0)
        self.tokens += output.tokens
        if output.logprobs is None:
            self.logprobs = None if output.tokens else self.logprobs
        elif self.logprobs is not None:
            self.logprobs += output.logprobs

    def output(self) -> SequenceOutput:
        """The whole sequence as one output, cut where it ended."""
        end = self.choice.end
        assert end is not None
        kept = self.choice.num_tokens
        return SequenceOutput(
            sample_index=self.choice.index,
            tokens=self.tokens[:kept],
            logprobs=None if self.logprobs is None else self.logprobs[:kept],
            finish=end.reason,
            stop_token_id=end.stop_token_id,
            cumulative_logprob=self.choice.cumulative_logprob,
            error=end.error,
        )

    def score(self) -> tuple[bool, float]:
        """Sound before failed, then the mean log-probability."""
        end, total = self.choice.end, self.choice.cumulative_logprob
        is_sound = end is not None and end.reason in (FinishReason.STOP, FinishReason.LENGTH)
        mean = float("-inf") if total is None else total / max(1, self.choice.num_tokens)
        return is_sound, mean


@dataclass(frozen=True, slots=True)
class _Ranking:
    """All sequences of a request whose choices are known only at the end.

    Attributes:
        is_ordered: the engine gives them best first, as beam search does.
    """

    candidates: Sequence[_Candidate]
    is_ordered: bool

    @property
    def is_done(self) -> bool:
        return all(candidate.choice.end is not None for candidate in self.candidates)

    def best(self, n: int) -> list[SequenceOutput]:
        """The n best; of equal ones the first."""
        ranked = list(self.candidates)
        if not self.is_ordered:
            ranked.sort(key=_Candidate.score, reverse=True)  # stable
        return [candidate.output() for candidate in ranked[:n]]


class _PromptDeltas:
    """The deltas that show the prompt: at once, or when its log-probabilities are in.

    A choice that the client resumes has had its own.
    """

    def __init__(
        self, validated: Validated, text: str, outbox: deque[inference_pb2.GenerateResponse]
    ) -> None:
        response = validated.response
        self._tokens = validated.request.prompt_tokens
        self._text = text if response.echo and not validated.text.omit_text else ""
        self._wants_logprobs = response.num_prompt_logprobs is not None
        self._indices = [index for index in range(response.n) if index not in response.resumed]
        self._is_due = response.echo or self._wants_logprobs
        self._outbox = outbox
        self._logprobs: list[PositionLogprobs] = []
        self._source: int | None = None

    def open(self) -> None:
        if not self._wants_logprobs or len(self._tokens) == 1:
            self.close()

    def add(self, output: SequenceOutput) -> None:
        """Collect log-probabilities from the first sequence that brings any."""
        if not output.prompt_logprobs or not self._is_due:
            return
        if self._source is None:
            self._source = output.sample_index
        if self._source == output.sample_index:
            self._logprobs += output.prompt_logprobs
        if len(self._logprobs) >= len(self._tokens) - 1:
            self.close()

    def close(self) -> None:
        """Show the prompt if it is still due."""
        if not self._is_due:
            return
        self._is_due = False
        logprobs: list[PositionLogprobs | None] | None = None
        if self._wants_logprobs:
            known = self._logprobs[-len(self._tokens) :]
            missing = len(self._tokens) - len(known)  # at least the first token's
            logprobs = [*([None] * missing), *known]
        for index in self._indices:
            self._outbox += events.deltas(index, self._text, self._tokens, logprobs, is_prompt=True)
