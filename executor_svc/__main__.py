"""`octavo executor`: flags in, exit status out, and one line on stderr if it cannot start."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.standard_streams import ensure_standard_streams

from executor_svc.errors import StartupError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable
    from pathlib import Path

    from executor_svc.config import ExecutorConfig
    from executor_svc.device_thread import Engine
    from executor_svc.tensor_parallel.ranks import Place

_EXIT_STARTUP = 1
_EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run the executor until SIGTERM or SIGINT.

    Args:
        argv: flags without the program's name; None takes the process's own.

    Returns: 2 if a flag was wrong. Otherwise it ends the process: with 0 after a drain,
        with 1 if it could not start or the device died.
    """
    from executor_svc.config import read_config
    from executor_svc.tensor_parallel.ranks import read_place
    from executor_svc.tensor_parallel.starter import end_with_starter

    ensure_standard_streams()
    argv = sys.argv[1:] if argv is None else argv
    try:
        config = read_config(argv)
        place = read_place(os.environ, config.tensor_parallel_size)
        if place is not None:
            end_with_starter()
    except StartupError as error:
        return _complain(error, _EXIT_USAGE)
    try:
        _check_packages()
    except StartupError as error:
        return _complain(error, _EXIT_STARTUP)
    _prepare_environment()
    if place is not None:
        # torch.distributed prints a page of its own beside each error that it raises.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from executor_svc.logs import configure_logging

    configure_logging(config.log_level, config.log_format)
    try:
        if place is None and config.tensor_parallel_size > 1:
            status = _launch(config, argv)
        elif place is None or place.leads:
            status = _serve(config, place)
        else:
            status = _follow(config, place)
    except StartupError as error:
        status = _complain(error, _EXIT_STARTUP)
    return _leave(status)


def _launch(config: ExecutorConfig, argv: list[str]) -> int:
    """Start ranks, unless they are more than the model has heads."""
    from executor_svc.model_store import ModelStoreError, resolve
    from executor_svc.tensor_parallel.launcher import check_number, launch

    try:
        folder = resolve(config.model, config.model_store)
    except ModelStoreError as error:
        raise StartupError(str(error)) from error
    check_number(config.tensor_parallel_size, folder)
    return launch(argv, config.tensor_parallel_size)


def _serve(config: ExecutorConfig, place: Place | None) -> int:
    import asyncio

    from executor_svc.server import serve

    def load() -> Engine:  # on the device thread: torch and the model take their time
        engine: Engine = _load(config, place)
        return engine

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(serve(config, load))


def _follow(config: ExecutorConfig, place: Place) -> int:
    """Be a rank other than 0, which ends when rank 0 says so, or is gone."""
    import signal

    import structlog

    from executor_svc.errors import DeviceLost
    from executor_svc.tensor_parallel.follower import Follower

    structlog.contextvars.bind_contextvars(rank=place.rank)
    log = structlog.get_logger(__name__)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        follower = _load(config, place)
        assert isinstance(follower, Follower)
        log.info("rank_ready", size=place.size)
        follower.run()
    except DeviceLost as error:
        log.critical("rank_lost", reason=str(error))
        return _EXIT_STARTUP
    except StartupError as error:
        raise StartupError(f"rank {place.rank}: {error}") from error
    return 0


def _check_packages() -> None:
    """Miss what runs a model before it is fetched, and without loading it.

    Raises:
        StartupError: if the extra was not installed.
    """
    from importlib.util import find_spec

    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise StartupError(f"{name} is not installed: pip install 'octavo[executor]'")


def _load(config: ExecutorConfig, place: Place | None = None) -> Any:
    """Load the model: the engine of the device thread, or a rank that follows it.

    Raises:
        StartupError: if that is not possible.
        DeviceLost: if another rank is gone.
    """
    import gc

    from executor_svc.model_store import ModelStoreError, resolve

    try:
        folder = resolve(config.model, config.model_store)
    except ModelStoreError as error:
        raise StartupError(str(error)) from error
    # Importing makes a million objects and no garbage: looking for some takes a fifth of
    # the time now, and a pause in the middle of a step each time later.
    gc.disable()
    try:
        executor = _load_from(config, place, folder)
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()
    return executor


def _load_from(config: ExecutorConfig, place: Place | None, folder: Path) -> Any:
    if place is None:
        from executor_svc.executor import Executor

        return Executor.load(config, folder)
    from executor_svc.tensor_parallel.follower import Follower
    from executor_svc.tensor_parallel.leader import Leader
    from executor_svc.tensor_parallel.ranks import Ranks, choose_device_type
    from executor_svc.tensor_parallel.sharing import check_shareable

    if place.leads:  # one rank is enough to complain
        check_shareable(folder, place, config.device)
    ranks = Ranks.join(place, choose_device_type(config.device))
    return (Leader if place.leads else Follower).load(config, folder, ranks)


def _leave(status: int) -> NoReturn:
    """End the process here and now, once all that was written has gone out.

    Taking the interpreter apart is a second of work for nothing with torch in it, and
    aborts if some native thread is still alive.
    """
    import logging

    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _complain(error: StartupError, status: int) -> int:
    sys.stderr.write(f"octavo executor: {error}\n")
    return status


def _prepare_environment() -> None:
    """Set what native libraries read once, before the first of them is loaded."""
    # An OpenMP thread that waits spins for some 50 us, the pause between two operators, and
    # then sleeps: to wake it costs a step of many small operators a fifth of its time, to
    # spin for ever starves the other processes.
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    # gRPC's own lines would stand beside our one line about a busy port.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def _loop_factory() -> Callable[[], AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # published for neither Windows nor every architecture
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
