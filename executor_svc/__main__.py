"""`octavo executor`: flags in, exit status out, and one line on stderr if it cannot start."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from executor_svc.errors import StartupError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable

    from executor_svc.config import ExecutorConfig
    from executor_svc.device_thread import Engine

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

    try:
        config = read_config(sys.argv[1:] if argv is None else argv)
    except StartupError as error:
        return _complain(error, _EXIT_USAGE)
    try:
        _check_packages()
    except StartupError as error:
        return _complain(error, _EXIT_STARTUP)
    _prepare_environment()
    import asyncio

    from executor_svc.logs import configure_logging
    from executor_svc.server import serve

    configure_logging(config.log_level, config.log_format)

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            status = runner.run(serve(config, partial(_load, config)))
    except StartupError as error:
        status = _complain(error, _EXIT_STARTUP)
    return _leave(status)


def _check_packages() -> None:
    """Miss what runs a model before it is fetched, and without loading it.

    Raises:
        StartupError: if the extra was not installed.
    """
    from importlib.util import find_spec

    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            raise StartupError(f"{name} is not installed: pip install 'octavo[executor]'")


def _load(config: ExecutorConfig) -> Engine:
    """Runs on the device thread: torch and the model take their time."""
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
        from executor_svc.executor import Executor

        executor = Executor.load(config, folder)
    finally:
        gc.enable()
    gc.collect()
    gc.freeze()
    return executor


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
