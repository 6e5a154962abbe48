"""Options that several sub-commands share."""

from __future__ import annotations

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
        help="Server to talk to; grpcs://HOST:PORT for TLS.",
    )(function)


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
