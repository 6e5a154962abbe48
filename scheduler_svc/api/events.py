"""The events of a Generate stream, from the core's values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from octavo.v1 import inference_pb2, types_pb2

from scheduler_svc.core.request import FinishReason, PositionLogprobs, TokenLogprob

# A delta with 20 log-probabilities per token stays well below the 4 MiB that a gRPC
# client takes by default.
_MAX_TOKENS_PER_DELTA = 1024

_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
}


def deltas(
    index: int,
    text: str,
    tokens: Sequence[int],
    logprobs: Sequence[PositionLogprobs | None] | None = None,
    *,
    is_prompt: bool = False,
) -> Iterator[inference_pb2.GenerateResponse]:
    """Make the deltas of some text and tokens: one, unless it would be too large to send.

    Log-probabilities are one per token; None stands for a token that has none, as the
    first of a prompt.
    """
    for start in range(0, max(1, len(tokens)), _MAX_TOKENS_PER_DELTA):
        part = slice(start, start + _MAX_TOKENS_PER_DELTA)
        delta = inference_pb2.Delta(
            index=index, text=text, token_ids=tokens[part], is_prompt=is_prompt
        )
        if logprobs is not None:
            delta.logprobs.extend(_position(entry) for entry in logprobs[part])
        text = ""
        yield inference_pb2.GenerateResponse(delta=delta)


def finished(
    index: int,
    reason: FinishReason,
    num_tokens: int,
    *,
    stop: str | None = None,
    stop_token_id: int | None = None,
    cumulative_logprob: float | None = None,
    error: str = "",
) -> inference_pb2.GenerateResponse:
    """Make the last event of a choice."""
    event = inference_pb2.Finished(
        index=index,
        reason=_REASONS[reason],
        num_tokens=num_tokens,
        cumulative_logprob=cumulative_logprob,
        error=error,
    )
    if stop is not None:
        event.stop = stop
    elif stop_token_id is not None:
        event.stop_token_id = stop_token_id
    return inference_pb2.GenerateResponse(finished=event)


def _position(entry: PositionLogprobs | None) -> types_pb2.PositionLogprobs:
    if entry is None:
        return types_pb2.PositionLogprobs()
    return types_pb2.PositionLogprobs(
        chosen=_token(entry.chosen), top=[_token(token) for token in entry.top]
    )


def _token(token: TokenLogprob) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob)
