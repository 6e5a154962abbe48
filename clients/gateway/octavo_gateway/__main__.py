"""`octavo gateway`: OpenAI's HTTP API in front of a scheduler."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo_gateway.config import GatewayConfig
    from octavo_gateway.errors import StartupError

_EXIT_STARTUP = 1
_EXIT_USAGE = 2


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT.

    Args:
        argv: flags; the process's own if None.
    Returns: exit status; after one line that says why, 2 if a flag was wrong and 1 if the
        gateway could not start.
    """
    # gRPC reports refused connections itself, at length.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from octavo.standard_streams import ensure_standard_streams

    from octavo_gateway.config import GatewayConfig
    from octavo_gateway.errors import StartupError

    ensure_standard_streams()
    try:
        config = GatewayConfig.from_args(sys.argv[1:] if argv is None else argv)
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
    sys.stderr.write(f"octavo gateway: {error}\n")
    return status


def _run(config: GatewayConfig) -> int:
    from octavo_gateway.logs import configure_logging
    from octavo_gateway.server import run

    configure_logging(config.log_level, config.log_format)
    return run(config)


if __name__ == "__main__":
    sys.exit(main())
