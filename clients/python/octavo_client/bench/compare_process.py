"""A peer's processes: started with their output in a file, waited for, measured, ended.

Linux only, as far as memory and descendants go: both are read from /proc.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from octavo_client._process import tail
from octavo_client.errors import OctavoError

_POLL_SECONDS = 0.1
STOP_SECONDS = 20.0  # a peer's own grace, before it is killed

# Runs before the peer, in its process: ask Linux for a SIGTERM if the process that
# measures dies first, so that no peer outlives it; then become the peer.
_LAUNCHER = """\
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")
"""


class PeerError(OctavoError):
    """A peer did not start, ended too early, or gave no result."""


class PeerProcess:
    """One peer and all its descendants.

    It is in a session of its own: a Ctrl-C of the terminal reaches only this process.

    Invariant: after `stop`, however it ends, neither it nor a descendant that was ever
    seen is left.

    Attributes:
        log: the file of its stderr, and of its stdout unless that goes elsewhere.
    """

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._process: asyncio.subprocess.Process | None = None
        self._seen: set[tuple[int, int]] = set()

    async def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: Path | None = None,
    ) -> None:
        """Run the command; its stdout goes to `output`, else to the log."""
        launcher = [sys.executable, "-P", "-S", "-c", _LAUNCHER, str(os.getpid())]
        with contextlib.ExitStack() as files:
            log = files.enter_context(self.log.open("ab"))
            out = files.enter_context(output.open("wb")) if output is not None else log
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            self._process = await asyncio.create_subprocess_exec(
                *launcher,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the first process."""
        assert self._process is not None
        return self._process.pid

    async def until_ready(self, is_ready: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Ask again and again until it is ready.

        Raises:
            PeerError: if it ends, or the time passes, first; with its log's last line.
        """
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while True:
            if self._process.returncode is not None:
                raise self._ended("before it was ready")
            left = deadline - time.monotonic()
            with contextlib.suppress(TimeoutError):
                if left > 0 and await asyncio.wait_for(is_ready(), left):
                    return
            if time.monotonic() >= deadline:
                raise PeerError(f"not ready after {seconds:g} s ({self._last_words()})")
            await asyncio.sleep(_POLL_SECONDS)

    async def until_ended(self, seconds: float) -> None:
        """Wait until it has ended well.

        Raises:
            PeerError: if it fails or takes longer.
        """
        assert self._process is not None
        try:
            code = await asyncio.wait_for(self._process.wait(), seconds)
        except TimeoutError:
            raise PeerError(f"not done after {seconds:g} s ({self._last_words()})") from None
        if code != 0:
            raise self._ended("without a result")

    def check_alive(self) -> None:
        """Raise PeerError if it has ended."""
        if self._process is not None and self._process.returncode is not None:
            raise self._ended("during the run")

    def peak_rss_bytes(self) -> int:
        """Sum of the peaks of all its processes that live now.

        An upper bound on what they had at one time: peaks need not coincide, and pages
        that processes share count for each.
        """
        self._look()
        return sum(_peak_rss_bytes(pid) for pid, _ in self._seen)

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ask the first process to end, and kill all that is left after `seconds`.

        A cancellation (Ctrl-C, again) means that this took too long: all is killed.
        """
        if self._process is None:
            return
        self._look()
        try:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), seconds)
        finally:
            self._kill_all()
        await self._process.wait()

    def _kill_all(self) -> None:
        self._look()
        for pid, started in self._seen:
            if _started_ticks(pid) == started:  # not another process, of the same id
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _look(self) -> None:
        """Remember every process that is in the session, or descends from one seen."""
        table = _processes()
        alive = {pid for pid, started in self._seen if _is_same(table, pid, started)}
        found = {self.pid} if self.pid in table else set()
        found |= alive | {pid for pid, (_, session, _) in table.items() if session == self.pid}
        while True:
            children = {pid for pid, (parent, _, _) in table.items() if parent in found}
            if children <= found:
                break
            found |= children
        self._seen = {(pid, table[pid][2]) for pid in found}

    def _ended(self, when: str) -> PeerError:
        code = self._process.returncode if self._process else None
        how = f"exit code {code}"
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-code).name
        return PeerError(f"ended {when}: {how} ({self._last_words()})")

    def _last_words(self) -> str:
        last = "".join(tail(self.log, 1)).strip()
        return f"log: {self.log}" + (f"; it says: {last}" if last else "")


def _is_same(table: dict[int, tuple[int, int, int]], pid: int, started: int) -> bool:
    return pid in table and table[pid][2] == started


def _processes() -> dict[int, tuple[int, int, int]]:
    """Process id -> (parent, session, start in ticks since boot)."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat_fields(int(entry.name))
        if fields:
            found[int(entry.name)] = (int(fields[1]), int(fields[3]), int(fields[19]))
    return found


def _stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name (proc(5)); none if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rsplit(")", 1)[1].split()


def _started_ticks(pid: int) -> int | None:
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def _peak_rss_bytes(pid: int) -> int:
    """VmHWM of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
