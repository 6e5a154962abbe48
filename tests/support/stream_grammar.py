"""What a Generate call may look like from outside, whatever was asked.

A call is one Started, deltas, one Finished per choice, one Usage; or it ends with a status
that says whose fault it was. Everything else is a fault of the service.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.rpc import error_details_pb2, status_pb2
from octavo.v1 import inference_pb2

_STATUS_KEY = "grpc-status-details-bin"
CLIENTS_FAULT = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def check_stream(events: Sequence[inference_pb2.GenerateResponse], n: int) -> None:
    """Require the whole stream of an accepted request.

    Args:
        events: all that came.
        n: choices that were asked for.

    Raises:
        AssertionError: if it is not one.
    """
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started", kinds
    assert kinds[-1] == "usage", kinds
    assert kinds.count("started") == kinds.count("usage") == 1, kinds
    ended: dict[int, inference_pb2.Finished] = {}
    num_tokens = dict.fromkeys(range(n), 0)
    for event in events[1:-1]:
        if event.WhichOneof("event") == "finished":
            assert event.finished.index not in ended, "a choice ended twice"
            assert event.finished.reason, "a choice ended without a reason"
            ended[event.finished.index] = event.finished
            continue
        delta = event.delta
        assert delta.index not in ended, "a delta after its choice ended"
        if delta.logprobs:
            assert len(delta.logprobs) == len(delta.token_ids)
        if not delta.is_prompt:
            num_tokens[delta.index] += len(delta.token_ids)
    assert ended.keys() == num_tokens.keys(), "not every choice ended"
    for index, finished in ended.items():
        assert num_tokens[index] <= finished.num_tokens
    started, usage = events[0].started, events[-1].usage
    assert started.request_id
    assert usage.num_prompt_tokens == started.num_prompt_tokens
    assert max(f.num_tokens for f in ended.values()) <= started.max_tokens


def check_refusal(code: grpc.StatusCode, trailing: Sequence[tuple[str, str | bytes]]) -> None:
    """Require a status that blames the client, with the details that go with it.

    Raises:
        AssertionError: if it does not.
    """
    packed = [value for key, value in trailing if key == _STATUS_KEY]
    assert code in CLIENTS_FAULT, code
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not packed:
        return  # the transport's own refusal of a message that is too large
    status = status_pb2.Status.FromString(bytes(packed[0]))  # type: ignore[arg-type]  # -bin
    kinds = {detail.TypeName(): detail for detail in status.details}
    info = error_details_pb2.ErrorInfo()
    assert kinds["google.rpc.ErrorInfo"].Unpack(info)
    assert info.domain == "octavo"
    assert info.reason
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        assert "google.rpc.BadRequest" in kinds, status
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert "google.rpc.RetryInfo" in kinds, status
