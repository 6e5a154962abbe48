"""Which executors are refused, and what the end of a stream means."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from octavo.protocol import PLAN_PROTOCOL
from octavo.v1 import executor_pb2 as pb

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.executor_link import ExecutorDied, ExecutorLost, check, core_config, explain_end


def described(**fields: Any) -> pb.DescribeResponse:
    """What an executor that fits says of itself."""
    values = {
        "model": "theirs",
        "fingerprint": "aa",
        "plan_protocol": PLAN_PROTOCOL,
        "octavo_version": "9.9",
        "block_size": 16,
        "num_device_blocks": 10,
        "max_num_batched_tokens": 256,
        "max_num_rows": 64,
        **fields,
    }
    return pb.DescribeResponse(**values)


def test_what_fits_is_taken() -> None:
    """The same model and protocol; or any model, where none is known."""
    check(described(), "aa", "ours")
    check(described(), "", "ours")


def test_another_model_is_refused_with_both_fingerprints() -> None:
    """And both names."""
    with pytest.raises(ExecutorLost) as refused:
        check(described(), "bb", "ours")
    for part in ("aa", "theirs", "bb", "ours"):
        assert part in str(refused.value)


@pytest.mark.parametrize("version", [0, PLAN_PROTOCOL + 1])
def test_another_protocol_is_refused_with_both_versions(version: int) -> None:
    """Older ones did not say."""
    with pytest.raises(ExecutorLost) as refused:
        check(described(plan_protocol=version), "aa", "ours")
    assert f"version {version} " in str(refused.value)
    assert f"version {PLAN_PROTOCOL}" in str(refused.value)
    assert "9.9" in str(refused.value)


def test_an_epoch_beyond_all_is_refused() -> None:
    """The next one could not be claimed."""
    check(described(epoch=2**62 - 1), "aa", "ours")
    with pytest.raises(ExecutorLost, match="epoch"):
        check(described(epoch=2**62), "aa", "ours")


def test_the_limits_are_the_least_of_both() -> None:
    """And of what the executor's memory was seen to allow."""
    config = SchedulerConfig(max_num_batched_tokens=1000, max_num_seqs=100)
    limits = core_config(config, described(), 500)
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (256, 64)
    limits = core_config(config, described(), 8)
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (8, 7)


class Ended:
    """A call that is over."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    async def code(self) -> grpc.StatusCode:
        return self._code

    async def details(self) -> str:
        return "why"


@pytest.mark.parametrize(
    ("code", "is_expected", "died"),
    [
        (grpc.StatusCode.OK, False, False),
        (grpc.StatusCode.FAILED_PRECONDITION, False, False),
        (grpc.StatusCode.UNAVAILABLE, False, True),
        (grpc.StatusCode.UNAVAILABLE, True, False),
        (grpc.StatusCode.INTERNAL, False, True),
        (grpc.StatusCode.CANCELLED, False, True),
    ],
)
async def test_the_end_of_a_stream(code: grpc.StatusCode, is_expected: bool, died: bool) -> None:
    """Refusals and orderly ends blame no request; silence may."""
    ended = await explain_end(Ended(code), is_expected=is_expected)
    assert isinstance(ended, ExecutorDied) is died
    assert str(ended) == f"{code.name}: why"
