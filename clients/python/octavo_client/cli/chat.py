"""`octavo chat`: a conversation in the terminal."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from octavo_client.cli._line_editing import start_line_editing
from octavo_client.cli._options import (
    connection_options,
    max_tokens_option,
    target_option,
    timeout_option,
)
from octavo_client.cli._words import counted, drop_max_tokens, hinted, notice_retry

if TYPE_CHECKING:
    from rich.console import Console

    from octavo_client import Client, GenerateParams, Message

_HELP = (
    "/retry asks again · /undo takes back · /reset forgets all · /stats · /exit · a line that ends "
    "with \\ goes on"
)


@dataclass
class _Conversation:
    """What was said, and what it took."""

    system: str | None
    messages: list[Message] = field(default_factory=list)
    asked: str | None = None
    num_replies: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_reply_tokens: int = 0
    reply_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was said."""
        from octavo_client import Message

        self.asked = None
        self.messages = [] if self.system is None else [Message("system", self.system)]

    def undo(self) -> str | None:
        """Forget the last message and its reply; returns the message, None if there is none."""
        if not self.messages or self.messages[-1].role != "assistant":
            return None
        taken = self.messages[-2].content
        del self.messages[-2:]
        self.asked = self.messages[-2].content if len(self.messages) > 1 else None
        return taken

    def stats(self) -> str:
        """One line of sums."""
        rate = self.num_reply_tokens / self.reply_seconds if self.reply_seconds else 0.0
        return (
            f"{self.num_replies} {'reply' if self.num_replies == 1 else 'replies'}, "
            f"{counted(self.num_reply_tokens, 'token')} at {rate:.1f} tokens/s; "
            f"{counted(self.num_prompt_tokens, 'prompt token')}, "
            f"{self.num_cached_tokens} of them cached"
        )


@click.command()
@target_option
@connection_options
@click.option("--system", metavar="TEXT", help="System message.")
@max_tokens_option
@click.option("--temperature", type=float, metavar="T", help="0 is greedy. [default: the model's]")
@click.option("--top-p", type=float, metavar="P", help="Keep tokens up to this probability mass.")
@click.option("--seed", type=int, metavar="SEED", help="Same seed, same replies.")
@click.option("--no-history", is_flag=True, help="Do not keep what is typed for the next time.")
@timeout_option
def chat(
    *,
    target: str,
    connection: dict[str, Any],
    system: str | None,
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    no_history: bool,
    timeout: float,
) -> int:
    """Chat with the model. Ctrl-C ends a reply, and at the prompt the chat.

    The arrow keys bring back what was typed, today and before.
    """
    from rich.console import Console

    from octavo_client import Client

    params: GenerateParams = {}
    if max_tokens:
        params["max_tokens"] = max_tokens
    if temperature is not None:
        params["temperature"] = temperature
    if top_p is not None:
        params["top_p"] = top_p
    if seed is not None:
        params["seed"] = seed
    if sys.stdin.isatty():
        start_line_editing(keep_history=not no_history)
    console = Console(highlight=False)
    with Client(target, timeout=timeout, on_retry=notice_retry, **connection) as client:
        model = client.model()
        if not model.has_chat_template:
            raise click.ClickException(
                f"{model.model} has no chat template: use octavo generate --raw"
            )
        console.print(f"{model.model}, {model.max_model_len} tokens of context", markup=False)
        console.print(_HELP, style="dim", markup=False)
        return _loop(client, _Conversation(system), params, console)


def _loop(
    client: Client, conversation: _Conversation, params: GenerateParams, console: Console
) -> int:
    while True:
        try:
            text = _read_message()
        except EOFError:
            console.print()
            return 0
        command = re.match(r"/\w*(?=\s|$)", text.strip())
        if command and command[0] in ("/exit", "/quit"):
            return 0
        if command:
            _obey(command[0], client, conversation, params, console)
        elif text.strip():
            _reply(client, conversation, text, params, console)


def _obey(
    command: str,
    client: Client,
    conversation: _Conversation,
    params: GenerateParams,
    console: Console,
) -> None:
    """Carry out a command, and say what was done."""
    said = ""
    match command:
        case "/reset":
            conversation.reset()
            said = "forgotten"
        case "/undo":
            taken = conversation.undo()
            said = "nothing to take back" if taken is None else f"taken back: {taken}"
        case "/retry":
            if conversation.asked is None:
                said = "nothing was asked yet"
            else:
                _ask_again(client, conversation, params, console)
        case "/stats":
            said = conversation.stats()
        case "/help":
            said = _HELP
        case _:
            said = f"no command {command}: {_HELP}"
    if said:
        console.print(said, style="dim", markup=False)


def _ask_again(
    client: Client, conversation: _Conversation, params: GenerateParams, console: Console
) -> None:
    """Ask what was asked last, whether it was answered or not; a failure changes nothing."""
    asked, before = conversation.asked, conversation.messages
    assert asked is not None
    conversation.messages = list(before)
    if len(before) > 1 and before[-2].content == asked:
        conversation.undo()
    if not _reply(client, conversation, asked, params, console):
        conversation.messages = before


def _read_message() -> str:
    """Read one message; lines that end with a backslash go on. Pastes keep their lines."""
    prompt = "> " if sys.stdin.isatty() else ""
    lines = [input(prompt)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… " if prompt else ""))
    return "\n".join(lines)


def _reply(
    client: Client,
    conversation: _Conversation,
    text: str,
    params: GenerateParams,
    console: Console,
) -> bool:
    """Stream one reply; what a Ctrl-C cut short stays in the history as it is, if any came.

    Returns: whether there is a reply in the history.
    """
    from octavo_client import Delta, Message, OctavoError, Usage

    conversation.asked = text
    messages = [*conversation.messages, Message("user", text)]
    parts: list[str] = []
    num_tokens, begin = 0, time.monotonic()
    try:
        with client.stream(messages=messages, **params) as stream:
            for event in stream:
                if isinstance(event, Delta):
                    parts.append(event.text)
                    num_tokens += len(event.token_ids)
                    sys.stdout.write(event.text)
                    sys.stdout.flush()
                elif isinstance(event, Usage):
                    conversation.num_prompt_tokens += event.num_prompt_tokens
                    conversation.num_cached_tokens += event.cached_prompt_tokens
    except KeyboardInterrupt:
        if not parts:
            console.print()
            return False
    except OctavoError as error:
        fewer = params.copy()
        if drop_max_tokens(error, fewer):
            return _reply(client, conversation, text, fewer, console)
        if parts:
            console.print()
        hint = "; /reset starts afresh" if len(messages) > 2 else ""
        click.echo("octavo: " + " ".join(f"{hinted(error)}{hint}".split()), err=True)
        return False
    seconds = time.monotonic() - begin
    rate = f"{counted(num_tokens, 'token')}, {num_tokens / seconds:.1f} tokens/s"
    console.print(f"\n{rate}", style="dim", markup=False)
    conversation.messages = [*messages, Message("assistant", "".join(parts))]
    conversation.num_replies += 1
    conversation.num_reply_tokens += num_tokens
    conversation.reply_seconds += seconds
    return True
