"""Addresses to listen at, and to connect to."""

from __future__ import annotations

import errno
import socket

from octavo_client._process import LocalError

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "": "127.0.0.1"}


def settle_address(listen: str, flag: str) -> str:
    """Check that HOST:PORT can be listened at; a port of 0 becomes a free one.

    gRPC servers share ports (SO_REUSEPORT), so that a second one on the same port would
    start and steal half of the calls: this is checked here.

    Raises:
        LocalError: if it cannot, saying which flag to change.
    """
    host, separator, port = listen.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65535:
        raise LocalError(f"{flag} must be HOST:PORT, got {listen!r}")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip("[]") or "0.0.0.0", int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            free_port = probe.getsockname()[1]
    except socket.gaierror:
        raise LocalError(f"{flag}: unknown host {host!r}") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LocalError(
                f"port {port} is in use: stop what listens there, or choose another with {flag}"
            ) from None
        raise LocalError(f"{flag}: cannot listen at {listen}: {error.strerror}") from None
    return f"{host}:{free_port}"


def connect_address(listen: str) -> str:
    """Return where to connect to, to reach what listens at HOST:PORT of this machine."""
    host, _, port = listen.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}"
