"""What `serve` and `demo` share: options, a spinner, a dead service's last words."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo_client._local import LocalOptions, LocalStack
from octavo_client._process import LocalError, tail

if TYPE_CHECKING:
    from rich.console import Console


def local_options(
    *, verbose: bool, log_dir: Path | None, start_timeout: float, **flags: Any
) -> LocalOptions:
    """Read the options that `stack_options` adds."""
    options = LocalOptions(**flags)
    return replace(options, echo_logs=verbose, log_dir=log_dir, start_seconds=start_timeout)


@contextlib.asynccontextmanager
async def running_stack(options: LocalOptions, console: Console) -> AsyncIterator[LocalStack]:
    """Start both services with a spinner that says what it waits for; stop them at the end."""
    spinner = console.status("starting") if console.is_terminal else None

    def show(what: str) -> None:
        if spinner is not None:
            spinner.update(f"waiting for {what}")
        else:
            console.print(f"waiting for {what}", highlight=False, markup=False, soft_wrap=True)

    stack = LocalStack(options, on_wait=show)
    try:
        if spinner is not None:
            spinner.start()
        async with stack:
            if spinner is not None:
                spinner.stop()
            yield stack
    except Exception as error:
        if stack.keeps_logs and str(stack.log_dir) not in str(error):
            message = f"logs kept in {stack.log_dir}"
            console.print(message, style="dim", highlight=False, markup=False, soft_wrap=True)
        raise
    finally:
        if spinner is not None:
            spinner.stop()


def show_log_tail(error: LocalError, console: Console) -> None:
    """Print the last lines of the log that an error points to, without those it quotes."""
    if error.log is None or error.is_explained:
        return
    lines = tail(error.log)
    if lines and lines[-1].strip() in str(error):
        lines.pop()
    for line in lines:
        console.print(f"  {line}", style="dim", highlight=False, markup=False, soft_wrap=True)


def stderr_console() -> Console:
    """Rich's console on stderr: stdout stays for results."""
    from rich.console import Console

    return Console(stderr=True)
