"""`octavo scheduler`: run the scheduler service."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_svc.config import SchedulerConfig
    from scheduler_svc.errors import StartupError

_EXIT_STARTUP = 1
_EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT.

    Args:
        argv: flags; the process's own if None.
    Returns: exit status; after one line that says why, 2 if a flag was wrong and 1 if the
        service could not start.
    """
    from octavo.standard_streams import ensure_standard_streams

    from scheduler_svc.config import SchedulerConfig
    from scheduler_svc.errors import StartupError

    ensure_standard_streams()
    try:
        config = SchedulerConfig.from_args(sys.argv[1:] if argv is None else argv)
    except StartupError as error:
        return _complain(error, _EXIT_USAGE)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    try:
        return _run(config)
    except StartupError as error:
        return _complain(error, _EXIT_STARTUP)
    except KeyboardInterrupt:
        return 130


def _complain(error: StartupError, status: int) -> int:
    sys.stderr.write(f"octavo scheduler: {error}\n")
    return status


def _run(config: SchedulerConfig) -> int:
    # gRPC reports refused connections itself, at length; the session logs them once.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from scheduler_svc import logs, runtime, server

    form = config.log_format
    if form == "auto":
        form = "console" if sys.stderr.isatty() else "json"
    logs.configure_logging(config.log_level, form)
    return runtime.run(server.serve(config))


if __name__ == "__main__":
    sys.exit(main())
