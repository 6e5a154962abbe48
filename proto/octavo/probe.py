"""Asks a gRPC server for its health: for probes, where an orchestrator's own speak no TLS.

Usage: python -P -m octavo.probe HOST:PORT [--ca-file FILE] [--cert-file FILE --key-file FILE]
       [--server-name NAME] [--timeout SECONDS]

Exit status: 0 if it says SERVING, 1 with one line on stderr if it does not or cannot be asked.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(args: Sequence[str] | None = None) -> int:
    """Ask once; gives the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m octavo.probe", description=main.__doc__, allow_abbrev=False
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--ca-file", type=Path, help="CAs, in PEM, that sign the server's.")
    parser.add_argument("--cert-file", type=Path, help="Certificate, in PEM, that is shown.")
    parser.add_argument("--key-file", type=Path, help="Its private key.")
    parser.add_argument("--server-name", default="", help="Name in the server's certificate.")
    parser.add_argument("--timeout", type=float, default=8.0, help="Seconds (default: 8).")
    options = parser.parse_args(args)
    try:
        said = _ask(options)
    except OSError as error:
        said = f"{error.filename}: {error.strerror}"
    if said == "SERVING":
        return 0
    sys.stderr.write(f"octavo.probe: {options.address}: {said}\n")
    return 1


def _ask(options: argparse.Namespace) -> str:
    """Give the server's word for its health, or in one line why there is none.

    Raises:  OSError: if a file cannot be read.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it reports refused connections at length
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    files = (options.ca_file, options.key_file, options.cert_file)
    pems = [None if path is None else path.read_bytes() for path in files]
    # An http_proxy in the environment has no business between a probe and its pod.
    channel_options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    if options.server_name:
        channel_options.append(("grpc.ssl_target_name_override", options.server_name))
    if any(pems) or options.server_name:
        channel = grpc.secure_channel(
            options.address, grpc.ssl_channel_credentials(*pems), channel_options
        )
    else:
        channel = grpc.insecure_channel(options.address, channel_options)
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=options.timeout
            )
        except grpc.RpcError as error:
            return " ".join(f"{error.code().name} {error.details()}".split())[:300]
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


if __name__ == "__main__":
    sys.exit(main())
