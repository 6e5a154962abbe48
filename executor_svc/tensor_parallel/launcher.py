"""`octavo executor --tensor-parallel-size N`: starts N ranks on this machine, and ends with them.

What torchrun does, with its process starter and its environment, but for signals: SIGTERM goes
to rank 0 alone, which drains and then ends the others, so that the exit status is 0.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType

from executor_svc.errors import StartupError
from executor_svc.logs import get_logger
from executor_svc.tensor_parallel.starter import STARTER_VARIABLE

_log = get_logger(__name__)

_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 5.0
"""How long rank 0 has to end after another rank failed, and the others after rank 0 ended."""

_EXIT_FAILED = 1


def launch(argv: list[str], size: int) -> int:
    """Run the ranks until they end.

    Args:
        argv: flags of `octavo executor`, for each of them.
        size: how many ranks.

    Returns: rank 0's status after a signal; else 0 if all ended with 0, or the status of the
        first one that did not.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented there
    from torch.distributed.elastic import multiprocessing

    # What it would say of ranks that fail is said by them, or below.
    logging.getLogger(multiprocessing.__name__).setLevel(logging.CRITICAL)
    # Ranks meet here. A free port, of this machine alone: nobody else has business there.
    meeting = socket.create_server(("127.0.0.1", 0))
    port = meeting.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=meeting.detach(),
    )
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        STARTER_VARIABLE: str(os.getpid()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    ranks, safe_path = range(size), ("-P",) if sys.flags.safe_path else ()
    with tempfile.TemporaryDirectory(prefix="octavo-ranks-") as folder:
        processes = multiprocessing.start_processes(
            name="octavo-executor",
            entrypoint=sys.executable,
            args=dict.fromkeys(ranks, (*safe_path, "-m", "executor_svc", *argv)),
            envs={rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks},
            logs_specs=multiprocessing.DefaultLogsSpecs(folder),  # it wants one, and logs nothing
        )
        is_asked = _hand_signals_on(processes.pids()[0])
        _wait(list(processes.pids().values()))
        result = processes.wait(period=_POLL_SECONDS)
    failures = {} if result is None else result.failures
    if not failures or (is_asked.is_set() and 0 not in failures):
        return 0
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    if first.exitcode > 0:
        return first.exitcode  # it has said why
    _log.critical("rank_killed", rank=first.local_rank, signal=-first.exitcode)
    return _EXIT_FAILED


def check_number(size: int, folder: Path) -> None:
    """Refuse what no model bears, before so many processes are started.

    Args:
        size: how many ranks.
        folder: a Hugging Face model folder; what else is wrong with it is for the ranks to say.

    Raises:
        StartupError: if there are more ranks than attention heads.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        num_heads = config.get("text_config", config).get("num_attention_heads")
        if isinstance(num_heads, int) and size > num_heads:
            raise StartupError(
                f"--tensor-parallel-size must be at most the model's {num_heads} attention heads, "
                f"got {size}"
            )


def _hand_signals_on(leader: int) -> threading.Event:
    """Let rank 0 have SIGTERM and SIGINT; returns what is set once one has come."""
    is_asked = threading.Event()

    def hand_on(number: int, _: FrameType | None) -> None:
        is_asked.set()
        with contextlib.suppress(ProcessLookupError):  # it has ended, which is about to be seen
            os.kill(leader, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    return is_asked


def _wait(pids: list[int]) -> None:
    """Wait until all ranks have ended.

    Once one has failed rank 0 gets a moment, to tell who owns it. Once rank 0 has ended well the
    others get one, to end as it told them, if it could; once it has failed, none.
    """
    give_up = None
    while running := [pid for pid in pids if _ending(pid) is None]:
        has_failed = any(_ending(pid) not in (None, 0) for pid in pids)
        if give_up is None and (has_failed or pids[0] not in running):
            give_up = time.monotonic() + _CLOSE_SECONDS
        is_headless = has_failed and pids[0] not in running
        if give_up is not None and (is_headless or time.monotonic() > give_up):
            for pid in running:
                os.kill(pid, signal.SIGKILL)  # a stopped process takes no other signal
            return
        time.sleep(_POLL_SECONDS)


def _ending(pid: int) -> int | None:
    """How a child ended, 0 if well; None if it runs. It is left to be waited for."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else _EXIT_FAILED
