"""What ranks tell one another, in two real processes over gloo; and how a rank finds its place."""

from __future__ import annotations

import json
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch import multiprocessing
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from executor_svc.errors import DeviceLost, StartupError, UnsupportedModel
from executor_svc.tensor_parallel import ranks as ranks_module
from executor_svc.tensor_parallel import starter
from executor_svc.tensor_parallel.launcher import check_number
from executor_svc.tensor_parallel.link import INLINE_BYTES, Kind, Link, Message
from executor_svc.tensor_parallel.ranks import (
    Place,
    Ranks,
    concatenate_over_ranks,
    read_place,
    sum_over_ranks,
)
from executor_svc.tensor_parallel.sharing import check_heads, check_shareable
from tests.support.rank_pair import join_pair

SECONDS = 30.0
SIZES = (0, 1, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, 300_000)
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_a_place_is_read_from_the_environment_of_torchrun() -> None:
    """All four variables; the flag may repeat the number of ranks."""
    assert read_place(TORCHRUN, 1) == read_place(TORCHRUN, 4) == Place(1, 4, 1, 2)
    assert not Place(1, 4, 1, 2).leads
    assert Place(0, 4, 0, 2).leads


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_process_is_alone_unless_torchrun_says_otherwise(environ: dict[str, str]) -> None:
    """Then the flag is for the launcher."""
    assert read_place(environ, 1) is None
    assert read_place(environ, 2) is None


@pytest.mark.parametrize(
    ("changes", "wanted", "message"),
    [
        ({"LOCAL_RANK": ""}, 1, "LOCAL_RANK"),
        ({"RANK": "one"}, 1, "incomplete"),
        ({"RANK": "4"}, 1, "RANK 4 of 4"),
        ({"LOCAL_RANK": "2"}, 1, "LOCAL_RANK 2 of 2"),
        ({"LOCAL_WORLD_SIZE": "5"}, 1, "of 5"),
        ({}, 2, "--tensor-parallel-size is 2, but torchrun started 4"),
    ],
)
def test_a_broken_environment_is_refused(
    changes: dict[str, str], wanted: int, message: str
) -> None:
    """In one line that names what is wrong."""
    with pytest.raises(StartupError, match=message):
        read_place({**TORCHRUN, **changes}, wanted)


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (
            LlamaConfig(hidden_size=72, num_attention_heads=9, num_key_value_heads=3),
            2,
            "3 KV heads; it may be 1, 3",
        ),
        (
            LlamaConfig(num_attention_heads=8, num_key_value_heads=4),
            8,
            "4 KV heads; it may be 1, 2, 4",
        ),
        (GPT2Config(), 2, "no tensor parallel plan for gpt2"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(
    config: PreTrainedConfig, size: int, message: str
) -> None:
    """Before a weight is read."""
    with pytest.raises(StartupError, match=message) as caught:
        check_heads(config, size)
    assert isinstance(caught.value, UnsupportedModel) == (config.model_type == "gpt2")


@pytest.mark.parametrize(
    ("device", "num_gpus", "message"),
    [
        ("cuda:1", 2, "--device cuda:1 names one GPU, and each rank needs its own"),
        ("cuda", 1, "2 ranks on this machine need a GPU each, and torch sees 1"),
        ("cuda", 0, "torch sees 0"),
        ("auto", 1, "torch sees 1"),
        ("cpu", 1, "set CUDA_VISIBLE_DEVICES to nothing"),
    ],
)
def test_devices_that_do_not_go_round_are_refused(
    device: str, num_gpus: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a rank waits for the others."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: num_gpus > 0)
    with pytest.raises(StartupError, match=message):
        check_shareable(tmp_path, Place(0, 2, 0, 2), device)


def payload(size: int) -> bytes:
    return bytes(number % 251 for number in range(size))


def rank_zero(ranks: Ranks) -> None:
    link = Link(ranks, SECONDS)
    for kind in (Kind.STEP, Kind.RESET):
        for size in SIZES:
            link.send(Message(kind, payload(size)))
    link.meet()


def rank_one(ranks: Ranks) -> None:
    link = Link(ranks, SECONDS)
    for kind in (Kind.STEP, Kind.RESET):
        for size in SIZES:
            assert link.receive() == Message(kind, payload(size))
    link.meet()


def both(ranks: Ranks) -> None:
    rank = ranks.place.rank
    assert ranks.least(10 + rank) == 10
    assert ranks.least(10 - rank) == 9
    assert ranks.gather(b"") == [b"", b""]
    assert ranks.gather(b"abc" * rank) == [b"", b"abc"]
    ranks.require_same("setting", "equal")
    with pytest.raises(StartupError, match="rank 1 has another setting than rank 0: of 1 and of 0"):
        ranks.require_same("setting", f"of {rank}")
    tokens = torch.tensor([5, 6]) + 10 * rank
    ranks.broadcast(tokens)
    assert tokens.tolist() == [5, 6]
    values = torch.ones(3, 2) * (rank + 1)
    sum_over_ranks(values)
    assert values.tolist() == [[3.0, 3.0]] * 3
    columns = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank
    assert concatenate_over_ranks(columns).tolist() == [[1, 2, 11, 12], [3, 4, 13, 14]]


def until_lost(ranks: Ranks) -> None:
    if ranks.place.rank == 1:
        return
    link = Link(ranks, SECONDS)
    with pytest.raises(DeviceLost, match="another rank of this executor is gone"):
        for _ in range(1000):
            link.send(Message(Kind.BEAT, payload(300_000)))


def only_join(ranks: Ranks) -> None:
    Link(ranks, SECONDS)


def run_rank(rank: int, rendezvous: str, work: tuple[Callable[[Ranks], None], ...]) -> None:
    torch.set_num_threads(1)
    try:
        ranks = join_pair(rank, rendezvous, SECONDS)
        work[rank](ranks)
        os._exit(0)  # as the service ends: gloo's threads do not bear to be taken apart
    except BaseException:
        traceback.print_exc()
        raise


@pytest.mark.parametrize(
    "work",
    [(rank_zero, rank_one), (both, both), (until_lost, only_join)],
    ids=["messages", "agreement", "loss"],
)
def test_two_ranks(
    work: tuple[Callable[[Ranks], None], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of every length arrive whole and in order; ranks agree; a lost one is noticed."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3])  # they import this module
    multiprocessing.spawn(run_rank, (str(tmp_path / "meet"), work), nprocs=2)


def test_whoever_does_not_come_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the time that ranks wait for one another, not that of loading."""
    monkeypatch.setattr(ranks_module, "START_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(StartupError, match="rank 0 of 2 did not meet the others"):
        Ranks.join(Place(0, 2, 0, 2), "cpu")


def test_more_ranks_than_heads_are_refused_at_once(tmp_path: Path) -> None:
    """Whatever else is wrong is for the ranks to say."""
    check_number(500, tmp_path)
    config = tmp_path / "config.json"
    for text in ("{", "[]", "{}", json.dumps({"num_attention_heads": "many"})):
        config.write_text(text)
        check_number(500, tmp_path)
    config.write_text(json.dumps({"text_config": {"num_attention_heads": 8}}))
    check_number(8, tmp_path)
    with pytest.raises(StartupError, match="at most the model's 8 attention heads, got 9"):
        check_number(9, tmp_path)


def test_a_rank_whose_starter_is_gone_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent is another process by now."""
    monkeypatch.setattr(starter.ctypes, "CDLL", MagicMock())
    monkeypatch.setenv(starter.STARTER_VARIABLE, str(os.getppid()))
    starter.end_with_starter()
    monkeypatch.setenv(starter.STARTER_VARIABLE, "1")
    with pytest.raises(StartupError, match="started the ranks is gone"):
        starter.end_with_starter()
