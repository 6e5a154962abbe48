"""Options that several sub-commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from octavo_client._channel import DEFAULT_TARGET

_F = TypeVar("_F", bound=Callable[..., Any])


def target_option(function: _F) -> _F:
    """--target of a running server."""
    return click.option(
        "--target",
        default=DEFAULT_TARGET,
        envvar="OCTAVO_TARGET",
        show_default=True,
        show_envvar=True,
        metavar="HOST:PORT",
        help="Server to talk to; grpcs://HOST:PORT for TLS, HOST:PORT,HOST:PORT for replicas.",
    )(function)


_FILE = click.Path(path_type=Path, exists=True, dir_okay=False, readable=True)
_MAX_KEY_FILE_BYTES = 64 * 1024
_CONNECTION_OPTIONS = (
    click.option(
        "--ca-file",
        type=_FILE,
        help="CAs of the server's certificate, as PEM: turns TLS on.  [env var: OCTAVO_CA_FILE]",
    ),
    click.option(
        "--cert-file",
        type=_FILE,
        help="Certificate to show to the server, as PEM.  [env var: OCTAVO_CERT_FILE]",
    ),
    click.option(
        "--key-file",
        type=_FILE,
        help="That certificate's private key, as PEM.  [env var: OCTAVO_KEY_FILE]",
    ),
    click.option(
        "--server-name",
        metavar="NAME",
        help="Name in the server's certificate.  [default: the target's host]",
    ),
    click.option(
        "--api-key-file",
        type=_FILE,
        help="File that holds the API key alone.  [default: the key itself in OCTAVO_API_KEY]",
    ),
)


def connection_options(function: _F) -> _F:
    """Options of TLS and of the API key, for the commands with a --target.

    The command gets them as `connection`, for `Client(target, **connection)`. There is no
    flag for the key itself: all users of a machine see each other's command lines.
    """

    @functools.wraps(function)
    def command(*args: Any, api_key_file: Path | None, **kwargs: Any) -> Any:
        names = ("ca_file", "cert_file", "key_file", "server_name")
        connection = {name: kwargs.pop(name) for name in names}
        if api_key_file is not None:
            connection["api_key"] = _read_key(api_key_file)
        return function(*args, connection=connection, **kwargs)

    for option in reversed(_CONNECTION_OPTIONS):
        command = option(command)
    return command  # type: ignore[return-value]  # click calls it with what the options bring


def _read_key(path: Path) -> str:
    """Read a key from a file of one line.

    Raises:  click.BadParameter: if the file holds no key.
    """
    with path.open("rb") as file:
        text = file.read(_MAX_KEY_FILE_BYTES).decode("ascii", "replace").strip()
    if not text:
        raise click.BadParameter(f"{path} is empty", param_hint="--api-key-file")
    return text


def max_tokens_option(function: _F) -> _F:
    """--max-tokens of one request; a small default, since a context can take many minutes."""
    return click.option(
        "--max-tokens",
        type=click.IntRange(min=0),
        default=256,
        show_default=True,
        metavar="TOKENS",
        help="Most tokens of one answer; 0, or more than are left: to the end of the context.",
    )(function)


def timeout_option(function: _F) -> _F:
    """--timeout of one request."""
    return click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="Deadline of one request.",
    )(function)


_STACK_OPTIONS = (
    click.option(
        "--model",
        metavar="REF",
        help="What `octavo model fetch` understands: a name, a folder, a hub id. "
        "[default: the small one that `octavo model fetch` gets]",
    ),
    click.option("--dtype", metavar="DTYPE", help="Type of weights and KV pool, such as bfloat16."),
    click.option("--block-size", type=int, metavar="TOKENS", help="Tokens per KV block."),
    click.option("--num-blocks", type=int, metavar="N", help="KV blocks on the device."),
    click.option("--num-host-blocks", type=int, metavar="N", help="KV blocks in host memory."),
    click.option(
        "--max-num-batched-tokens", type=int, metavar="TOKENS", help="Most tokens in one step."
    ),
    click.option(
        "--max-num-rows", type=int, metavar="N", help="Most sequences on the executor at once."
    ),
    click.option(
        "--scheduler-arg",
        "scheduler_args",
        multiple=True,
        metavar="ARG",
        help="Passed to the scheduler as it is; repeat it, as in --scheduler-arg=--log-level "
        "--scheduler-arg=debug.",
    ),
    click.option(
        "--executor-arg",
        "executor_args",
        multiple=True,
        metavar="ARG",
        help="Passed to the executor as it is; repeat it.",
    ),
    click.option(
        "--log-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder of scheduler.log and executor.log. [default: a temporary one, kept only "
        "after a failure]",
    ),
    click.option("--verbose", is_flag=True, help="Show the services' logs here too."),
    click.option(
        "--start-timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=180.0,
        show_default=True,
        metavar="SECONDS",
        help="How long the services may take to be ready.",
    ),
)


def stack_options(function: _F) -> _F:
    """Options of commands that start both services; `local_options` reads them."""
    for option in reversed(_STACK_OPTIONS):
        function = option(function)
    return function
