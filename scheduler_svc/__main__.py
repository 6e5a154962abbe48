"""`octavo scheduler`: run the scheduler service."""

from __future__ import annotations

import asyncio
import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT.

    Args:
        argv: flags; the process's own if None.
    Returns: exit status; 2 if the service cannot start, after one line that says why.
    """
    from scheduler_svc.config import SchedulerConfig
    from scheduler_svc.errors import StartupError

    try:
        config = SchedulerConfig.from_args(sys.argv[1:] if argv is None else argv)
        return _run(config)
    except StartupError as error:
        print(f"octavo scheduler: {error}", file=sys.stderr)  # noqa: T201  # it is the answer
        return 2
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130


def _run(config: object) -> int:
    # gRPC reports refused connections itself, at length; the session logs them once.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from scheduler_svc import logs, server
    from scheduler_svc.config import SchedulerConfig

    assert isinstance(config, SchedulerConfig)
    logs.configure_logging(config.log_level, config.log_format)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(server.serve(config))
    return int(uvloop.run(server.serve(config)))


if __name__ == "__main__":
    sys.exit(main())
