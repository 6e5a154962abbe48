"""Building requests and reading the events of a Generate stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.v1 import inference_pb2

from scheduler_svc.core.request import PositionLogprobs, SequenceOutput, TokenLogprob


def ask(text: str = "hello world", **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=text, **fields)


def out(tokens: Sequence[int], index: int = 0, **fields: Any) -> SequenceOutput:
    return SequenceOutput(sample_index=index, tokens=list(tokens), **fields)


def scored(tokens: Sequence[int], logprob: float) -> list[PositionLogprobs]:
    return [PositionLogprobs(TokenLogprob(token, logprob)) for token in tokens]


def script(service: Any, *items: Any) -> None:
    service.engine.script = lambda request: items


def kinds(events: list[inference_pb2.GenerateResponse]) -> list[str]:
    return [str(event.WhichOneof("event")) for event in events]


def text_of(
    events: list[inference_pb2.GenerateResponse], index: int = 0, *, prompt: bool = False
) -> str:
    found = (e.delta for e in events if e.WhichOneof("event") == "delta")
    return "".join(d.text for d in found if d.index == index and d.is_prompt is prompt)


def tokens_of(events: list[inference_pb2.GenerateResponse], index: int = 0) -> list[int]:
    found = (e.delta for e in events if e.WhichOneof("event") == "delta")
    return [t for d in found if d.index == index and not d.is_prompt for t in d.token_ids]


def ends(events: list[inference_pb2.GenerateResponse]) -> dict[int, inference_pb2.Finished]:
    found = [e.finished for e in events if e.WhichOneof("event") == "finished"]
    assert len({end.index for end in found}) == len(found), "a choice finished twice"
    return {end.index: end for end in found}
