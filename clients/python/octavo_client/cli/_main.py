"""The command's root: which sub-commands there are, and what errors look like.

Every error is one line on stderr that says what to do, and an exit code other than 0:
1 for what went wrong, 2 for a wrong command line, 130 for Ctrl-C. OCTAVO_DEBUG=1 adds the
traceback.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

from octavo_client.cli._lazy import LazyGroup, ServiceCommands
from octavo_client.errors import ConnectionFailed, OctavoError

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

_OWN = {
    "serve": ("octavo_client.cli.serve:serve", "Serve a model on this machine."),
    "demo": ("octavo_client.cli.demo:demo", "Serve, stream eight prompts at once, check, stop."),
    "generate": ("octavo_client.cli.generate:generate", "Generate text from a prompt."),
    "chat": ("octavo_client.cli.chat:chat", "Chat with the model."),
    "top": ("octavo_client.cli.top:top", "Watch a scheduler: streams, pool, queue, steps."),
    "explain": ("octavo_client.cli.explain:explain", "Tell where a request's time went."),
    "bench": ("octavo_client.cli.bench:bench", "Measure a server under load."),
}
_SERVICES = ServiceCommands(
    entry_point_group="octavo.commands",
    expected={
        "scheduler": ("scheduler", "Run the scheduler service."),
        "executor": ("executor", "Run the executor service."),
        "gateway": ("gateway", "Serve OpenAI's HTTP API in front of a scheduler."),
        "model": ("executor", "Fetch models into the store, list what is there."),
        "keys": ("scheduler", "Make, list and revoke a scheduler's API keys."),
        "simulate": ("scheduler", "Simulate executors under a load."),
    },
)


@click.group(
    cls=LazyGroup,
    own=_OWN,
    services=_SERVICES,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="octavo", message="octavo %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Serve language models from a paged KV cache."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(argv: Sequence[str] | None) -> int:
    """Run the command; return the exit code."""
    if not _is_debugging():
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own lines are no one's help
    try:
        result = cli.main(
            args=None if argv is None else list(argv), prog_name="octavo", standalone_mode=False
        )
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has enough. Nothing more must be flushed to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except Exception as error:
        return _report(error)
    return result if isinstance(result, int) else 0


def _is_debugging() -> bool:
    return os.environ.get("OCTAVO_DEBUG", "0") not in ("", "0")


def _report(error: Exception) -> int:
    """Say in one line what went wrong; return the exit code."""
    if _is_debugging():
        traceback.print_exc()
    code = EXIT_FAILURE
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else "octavo"
        line = f"{error.format_message()} (see {path} --help)"
        code = EXIT_USAGE
    elif isinstance(error, click.ClickException):
        line, code = error.format_message(), error.exit_code
    elif isinstance(error, ConnectionFailed):
        line = f"{error} Start it, or give another --target."
    elif isinstance(error, OctavoError):
        line = str(error)
    elif isinstance(error, OSError):
        line = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    else:
        kind = type(error).__name__
        line = f"unexpected {kind}: {error} (OCTAVO_DEBUG=1 shows where; please report it)"
    with contextlib.suppress(BrokenPipeError):
        click.echo("octavo: " + " ".join(line.split()), err=True)
    return code
