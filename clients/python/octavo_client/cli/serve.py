"""`octavo serve`: executor and scheduler on this machine, until a signal or a death."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Any

import click

from octavo_client._local import LocalOptions, LocalStack
from octavo_client._process import LocalError
from octavo_client.cli._options import stack_options
from octavo_client.cli._stack import local_options, running_stack, show_log_tail, stderr_console

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.option(
    "--listen",
    default="127.0.0.1:50051",
    show_default=True,
    metavar="HOST:PORT",
    help="Where the scheduler listens; port 0 picks a free one.",
)
@click.option(
    "--executor-listen",
    metavar="HOST:PORT",
    help="Where the executor listens. [default: 127.0.0.1, a free port]",
)
@click.option(
    "--http",
    "http_listen",
    metavar="HOST:PORT",
    help="Also serve OpenAI's HTTP API there. [default: not at all]",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(min=0, max=3600),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long each service may take to finish its streams at the end.",
)
@click.option(
    "--insecure-bind",
    is_flag=True,
    help="Let the services listen without TLS on addresses other than loopback.",
)
@stack_options
def serve(drain_timeout: float, **flags: Any) -> int:
    """Serve a model on this machine: one executor, one scheduler.

    Ctrl-C or SIGTERM drains all and ends; a second one ends them at once.
    """
    options = local_options(stop_seconds=drain_timeout, **flags)
    return asyncio.run(_serve(options, stderr_console()))


async def _serve(options: LocalOptions, console: Console) -> int:
    received: list[signal.Signals] = []
    failed = False
    task = asyncio.current_task()
    assert task is not None

    def on_signal(number: signal.Signals) -> None:
        if not received:
            console.print("draining; once more ends at once", style="dim")
        received.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        async with running_stack(options, console) as stack:
            _say_ready(stack, console)
            try:
                await stack.wait()
            except LocalError as error:  # said before what is left is stopped
                show_log_tail(error, console)
                click.echo(f"octavo: {error}", err=True)
                failed = True
    except asyncio.CancelledError:
        if not received:
            raise
    except LocalError as error:
        if not received:
            show_log_tail(error, console)
            raise
    while task.cancelling():
        task.uncancel()
    if failed:
        return 1
    return 130 if received and received[0] is signal.SIGINT else 0


def _say_ready(stack: LocalStack, console: Console) -> None:
    """Print where it listens, and commands to paste.

    A stdout that is no terminal gets the address alone, for scripts.
    """
    if not sys.stdout.isatty():
        click.echo(stack.target)
        if stack.http_url:
            click.echo(stack.http_url)
    port = f" --target {stack.target}" if stack.target != "127.0.0.1:50051" else ""
    body = """'{"text": "Once upon a time", "stopping": {"max_tokens": 16}}'"""
    lines = [
        f"ready at {stack.target} after {stack.ready_seconds:.1f} s; logs in {stack.log_dir}",
        f'  octavo generate "Why is the sky blue?" --temperature 0{port}',
        f"  grpcurl -plaintext -d {body} \\",
        f"    {stack.target} octavo.v1.InferenceService/Generate",
    ]
    if stack.http_url:
        prompt = """'{"prompt": "Once upon a time"}'"""
        lines.append(f"  curl {stack.http_url}/v1/completions -d {prompt}")
        lines.append(f"  open {stack.http_url}/console in a browser")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    with contextlib.suppress(OSError):
        console.file.flush()
