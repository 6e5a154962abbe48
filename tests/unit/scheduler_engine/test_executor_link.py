"""Which executors are refused, and what limits a core has for one."""

from __future__ import annotations

from typing import Any

import pytest
from octavo.protocol import PLAN_PROTOCOL
from octavo.v1 import executor_pb2 as pb

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.executor_link import ExecutorLost, check, core_config


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
