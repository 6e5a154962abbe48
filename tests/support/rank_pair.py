"""Two ranks of one executor, as processes of a test."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from torch import distributed

from executor_svc.tensor_parallel.ranks import Place, Ranks

SIZE = 2


def join_pair(rank: int, meeting: Path | str, seconds: float) -> Ranks:
    """Meet the other one over a file, on the host.

    Args:
        rank: 0 or 1.
        meeting: a file that does not exist yet, the same for both.
        seconds: how long they wait for one another, now and in every call.
    """
    ranks = Ranks(Place(rank, SIZE, rank, SIZE))
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=seconds),
    )
    ranks._control = ranks.new_group(seconds)
    return ranks
