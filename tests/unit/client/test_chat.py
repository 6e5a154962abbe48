"""`octavo chat` as a process, against a scheduler that plays a script."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

OCTAVO = [sys.executable, "-P", "-m", "octavo_client"]


def octavo(*arguments: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*OCTAVO, *arguments], capture_output=True, text=True, timeout=30, check=False, **kwargs
    )


def test_chat_keeps_the_history_until_reset(fake: Any) -> None:
    """Each message goes with what was said before; /reset forgets; a backslash goes on."""
    typed = "one\ntwo \\\nlines\n/reset\nthree\n/stats\n/exit\n"
    done = octavo("chat", "--target", fake.target, "--max-tokens", "2", input=typed)
    assert done.returncode == 0, done.stderr
    said = [[turn.content for turn in request.chat.messages] for request in fake.requests]
    assert said == [["one"], ["one", "1 2 ", "two \nlines"], ["three"]]
    assert "3 replies, 6 tokens" in done.stdout


def test_chat_answers_an_unknown_command_itself(fake: Any) -> None:
    """A mistyped /command is not sent to the model; a path is no command."""
    typed = "/rest\n/stat now\n/etc/hosts is what?\n/exit\n"
    done = octavo("chat", "--target", fake.target, "--max-tokens", "1", input=typed)
    assert done.returncode == 0, done.stderr
    said = [request.chat.messages[0].content for request in fake.requests]
    assert said == ["/etc/hosts is what?"]
    assert "no command /rest: /retry asks again" in done.stdout
    assert "no command /stat: /retry asks again" in done.stdout
    assert "1 token, " in done.stdout


def test_chat_takes_back_and_asks_again(fake: Any) -> None:
    """/undo forgets the last message and its reply; /retry sends the last message anew."""
    typed = "/undo\n/retry\none\ntwo\n/undo\nthree\n/retry\n/stats\n"
    done = octavo(
        "chat", "--target", fake.target, "--system", "be brief", "--max-tokens", "1", input=typed
    )
    assert done.returncode == 0, done.stderr
    said = [[turn.content for turn in request.chat.messages][1:] for request in fake.requests]
    assert said == [["one"], ["one", "1 ", "two"], ["one", "1 ", "three"], ["one", "1 ", "three"]]
    assert "nothing to take back" in done.stdout
    assert "nothing was asked yet" in done.stdout
    assert "taken back: two" in done.stdout


def test_chat_asks_again_what_failed(fake: Any, wire: Any) -> None:
    """The question that got no answer is asked, and nothing that was said is lost."""
    refused = wire.Failure(grpc.StatusCode.INVALID_ARGUMENT, "not now")
    fake.failures = [None, refused, refused, None, None]
    typed = "one\ntwo\n/retry\n/retry\nthree\n"
    done = octavo("chat", "--target", fake.target, "--max-tokens", "1", input=typed)
    assert done.returncode == 0, done.stderr
    said = [[turn.content for turn in request.chat.messages] for request in fake.requests]
    assert said == [["one"], *[["one", "1 ", "two"]] * 3, ["one", "1 ", "two", "1 ", "three"]]


@pytest.mark.parametrize("keeps", [True, False])
def test_chat_remembers_what_was_typed_before(fake: Any, tmp_path: Path, keeps: bool) -> None:
    """In a terminal the arrow key brings it back the next time, unless told not to keep it."""
    flags = () if keeps else ("--no-history",)
    typed_in_terminal(fake, tmp_path, b"first question\n", *flags)
    arrow_up = b"\x1b[A\n"
    typed_in_terminal(fake, tmp_path, arrow_up, *flags)
    said = [request.chat.messages[-1].content for request in fake.requests]
    assert said == (["first question"] * 2 if keeps else ["first question"])
    file = tmp_path / "octavo" / "chat_history"
    assert file.exists() is keeps
    if keeps:
        assert file.stat().st_mode & 0o077 == 0, "others may read it"


def typed_in_terminal(fake: Any, state: Path, typed: bytes, *flags: str) -> None:
    """Run a chat in a terminal of its own, and leave it by Ctrl-D."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*OCTAVO, "chat", "--target", fake.target, "--max-tokens", "1", *flags],
        stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "XDG_STATE_HOME": str(state), "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    for line in (typed, b"\x04"):
        wait_for_prompt(ours)
        os.write(ours, line)
    with contextlib.suppress(OSError):  # its end is an error on a terminal
        while os.read(ours, 4096):
            pass
    os.close(ours)
    assert process.wait(timeout=20) == 0


def wait_for_prompt(terminal: int) -> None:
    """Read what a terminal shows up to the next line that asks for a message."""
    deadline = time.monotonic() + 20
    shown = b""
    while not re.search(rb"\n[^\n]*> ", shown):
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096)


def test_chat_keeps_a_cut_reply_as_it_is(fake: Any) -> None:
    """After a Ctrl-C the history has the text that came, and nothing added to it."""
    fake.delta_seconds = 0.05
    process = subprocess.Popen(
        [*OCTAVO, "chat", "--target", fake.target, "--max-tokens", "500"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write("one\n")
    process.stdin.flush()
    deadline = time.monotonic() + 20
    while not fake.requests and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert fake.cancelled.wait(5)
    fake.delta_seconds = 0.0
    process.communicate("two\n", timeout=20)
    _, reply, _ = (turn.content for turn in fake.requests[1].chat.messages)
    assert reply.startswith("1 2 ")
    assert reply == "".join(f"{number} " for number in range(1, len(reply.split()) + 1))
