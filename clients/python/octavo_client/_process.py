"""One child process: started with its log in a file, watched, drained or killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from octavo_client.errors import OctavoError

_NUM_TAIL_LINES = 12
_TAIL_BYTES = 16_384
_ECHO_SECONDS = 0.2

# Runs before the service, in its process: ask Linux for a SIGTERM if this process dies
# first, so that a killed parent leaves no service behind; then become the service. (A
# preexec_fn would do the same in a forked copy of a process with gRPC's threads.)
_LAUNCHER = """\
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, "-P", "-m", *sys.argv[2:]])
"""


class LocalError(OctavoError):
    """A service of this machine could not be started, or ended.

    Attributes:
        log: the log that says more, if any.
        is_explained: whether the message says all that there is to say: the service
            refused to start, and its one line about it is in the message.
    """

    def __init__(
        self, message: str, *, log: Path | None = None, is_explained: bool = False
    ) -> None:
        super().__init__(message)
        self.log = log
        self.is_explained = is_explained


def tail(log: Path, num_lines: int = _NUM_TAIL_LINES) -> list[str]:
    """Return the last lines of a log; none if it cannot be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _TAIL_BYTES, 0))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-num_lines:]


class Child:
    """A service in a process of its own.

    It is in a session of its own: a Ctrl-C of the terminal reaches only the parent,
    which decides the order in which the services end.
    """

    def __init__(self, name: str, log: Path, *, echo: bool) -> None:
        self.name = name
        self.log = log
        self._echo = echo
        self._echo_task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it was started, and has ended since."""
        return self._process is not None and self._process.returncode is not None

    async def start(self, module: str, flags: list[str]) -> None:
        """Run `python -m module flags`, with stdout and stderr in the log."""
        arguments = ["-P", "-S", "-c", _LAUNCHER, str(os.getpid()), module, *flags]
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if self._echo:
            self._echo_task = asyncio.create_task(self._echo_lines())

    async def wait(self) -> int:
        """Wait for its end; return the exit code."""
        assert self._process is not None
        return await self._process.wait()

    def error(self) -> LocalError:
        """Describe its unwanted end, in one line."""
        code = self._process.returncode if self._process else None
        if code is not None and code < 0:  # nothing that it said explains a signal
            with contextlib.suppress(ValueError):
                code_or_signal = signal.Signals(-code).name
                return LocalError(
                    f"the {self.name} was ended by {code_or_signal} (log: {self.log})",
                    log=self.log,
                )
        last = "".join(tail(self.log, 1)).strip()
        begin = f"octavo {self.name}: "  # of the one line by which a service refuses to start
        why = f": {last.removeprefix(begin)}" if last else ""
        return LocalError(
            f"the {self.name} ended with exit code {code}{why} (log: {self.log})",
            log=self.log,
            is_explained=last.startswith(begin),
        )

    async def stop(self, seconds: float) -> None:
        """Ask it to drain, and kill it if that takes longer than `seconds`."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), seconds)
            except TimeoutError:
                self.kill()
                await process.wait()
        if self._echo_task is not None:
            await asyncio.sleep(_ECHO_SECONDS)  # its last lines
            self._echo_task.cancel()
            self._echo_task = None

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _echo_lines(self) -> None:
        """Copy the log's lines to stderr as they come."""
        rest = ""
        with self.log.open(encoding="utf-8", errors="replace") as log:
            while True:
                *lines, rest = (rest + log.read()).split("\n")
                for line in lines:
                    sys.stderr.write(f"{self.name:>9} | {line}\n")
                await asyncio.sleep(_ECHO_SECONDS / 2)


async def run_to_last_line(label: str, module: str, arguments: list[str]) -> str:
    """Run `python -m module` to its end; return the last line of its stdout.

    Its progress shows on the terminal, if there is one.

    Raises:
        LocalError: if it fails, with its own last line.
    """
    shown = sys.stderr.isatty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", module, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=None if shown else asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        raise
    lines = out.decode("utf-8", "replace").split("\n")
    found = [line.strip() for line in lines if line.strip()]
    if process.returncode != 0 or not found:
        errors = [line for line in (err or b"").decode("utf-8", "replace").splitlines() if line]
        why = errors[-1].removeprefix("error: ") if errors else f"exit code {process.returncode}"
        raise LocalError(f"{label} failed: {why}")
    return found[-1]
