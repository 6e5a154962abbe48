"""`octavo generate`: one prompt, streamed to stdout."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import click

from octavo_client.cli._options import (
    connection_options,
    max_tokens_option,
    target_option,
    timeout_option,
)
from octavo_client.cli._words import drop_max_tokens, hinted, notice_retry

if TYPE_CHECKING:
    from octavo_client import Choice, Client, Completion, Event, GenerateParams


@click.command()
@click.argument("prompt")
@target_option
@connection_options
@click.option(
    "--chat/--raw",
    "chat",
    default=None,
    help="Answer the prompt as a chat message, or "
    "continue it as plain text. [default: chat if the model has a chat template]",
)
@click.option("--system", metavar="TEXT", help="System message before a chat prompt.")
@max_tokens_option
@click.option("--temperature", type=float, metavar="T", help="0 is greedy. [default: the model's]")
@click.option("--top-p", type=float, metavar="P", help="Keep tokens up to this probability mass.")
@click.option("--top-k", type=int, metavar="K", help="Keep the K likeliest tokens; 0 keeps all.")
@click.option(
    "--min-p", type=float, metavar="P", help="Drop tokens less likely than P times the best."
)
@click.option("--seed", type=int, metavar="SEED", help="Same seed, same tokens.")
@click.option("--n", type=click.IntRange(min=1), metavar="N", help="Number of choices.")
@click.option("--beam-width", type=int, metavar="WIDTH", help="Beam search instead of sampling.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeat it.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-sequence token.")
@click.option(
    "--logprobs",
    type=int,
    metavar="K",
    help="Report each token's log-probability, and "
    "those of the K likeliest (with --json; otherwise on stderr).",
)
@click.option("--echo", is_flag=True, help="Print the prompt too.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole completion as JSON.")
@timeout_option
def generate(
    *,
    prompt: str,
    target: str,
    connection: dict[str, Any],
    chat: bool | None,
    system: str | None,
    as_json: bool,
    timeout: float,
    max_tokens: int,
    beam_width: int | None,
    **flags: Any,
) -> None:
    """Generate text from PROMPT; "-" reads it from standard input."""
    from octavo_client import Beam, Client, DeadlineExceeded, InvalidArgument, NeverFits

    text = _read_prompt(prompt)
    # The options have the parameters' names. 0 is a value: only what was not given is left out.
    given = {k: v for k, v in flags.items() if v is not None and v is not False and v != ()}
    params = cast("GenerateParams", given)
    if max_tokens:
        params["max_tokens"] = max_tokens
    if beam_width is not None:
        params["beam"] = Beam(width=beam_width)
    with Client(target, timeout=timeout, on_retry=notice_retry, **connection) as client:
        if chat is None and system is None:
            chat = client.model().has_chat_template
        if chat is False and system is not None:
            raise click.UsageError("--system needs a chat prompt, not --raw")
        if chat or system is not None:
            turns = [("system", system)] if system is not None else []
            turns.append(("user", text))
            source: dict[str, Any] = {
                "messages": [{"role": role, "content": content} for role, content in turns]
            }
        else:
            source = {"prompt": text}
        show = _print_json if as_json else _print_stream
        try:
            try:
                completion = show(client, source, params)
            except (InvalidArgument, NeverFits) as error:
                if not drop_max_tokens(error, params):
                    raise
                completion = show(client, source, params)
        except DeadlineExceeded as error:
            raise click.ClickException(hinted(error)) from error
        _check(completion)


def _read_prompt(argument: str) -> str:
    """Return PROMPT, or standard input for "-"; both must be UTF-8.

    Raises: click.ClickException: if they are not, or are empty.
    """
    if argument == "-":
        raw, name = sys.stdin.buffer.read(), "standard input"
    else:
        raw, name = argument.encode("utf-8", "surrogateescape"), "PROMPT"
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.ClickException(
            f"{name} is not valid UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}"
        ) from None
    if not text:
        raise click.ClickException(f"{name} is empty: give at least one character")
    return text


def _print_json(client: Client, source: dict[str, Any], params: GenerateParams) -> Completion:
    completion = client.generate(**source, **params)
    click.echo(json.dumps(asdict(completion), ensure_ascii=False, indent=2))
    return completion


class _Printer:
    """Prints one choice as it comes, or several one after the other, each once it has ended.

    Invariant: what was printed ends with a newline once `end` was called.
    """

    def __init__(self, *, is_live: bool) -> None:
        self._is_live = is_live
        self._waiting: dict[int, str] = {}  # by choice: text not printed yet

    def add(self, event: Event) -> None:
        """Print what this event allows."""
        from octavo_client import Delta, Finished

        if isinstance(event, Delta):
            if self._is_live:
                click.echo(event.text, nl=False)
                sys.stdout.flush()
            else:
                self._waiting[event.index] = self._waiting.get(event.index, "") + event.text
        elif isinstance(event, Finished) and not self._is_live:
            self._print(event.index)

    def end(self) -> None:
        """Print what came of choices that have not ended."""
        if self._is_live:
            click.echo()
        for index in sorted(self._waiting):
            self._print(index)

    def _print(self, index: int) -> None:
        click.echo(f"[{index}] {self._waiting.pop(index, '')}")
        sys.stdout.flush()


def _print_stream(client: Client, source: dict[str, Any], params: GenerateParams) -> Completion:
    """Print text as it comes; an error comes after all that came before it."""
    from octavo_client import Delta, OctavoError
    from octavo_client._protocol import CompletionBuilder

    builder = CompletionBuilder()
    printer = _Printer(is_live=params.get("n", 1) == 1)
    has_text = False
    with client.stream(**source, **params) as stream:
        try:
            for event in stream:
                builder.add(event)
                has_text |= isinstance(event, Delta)
                printer.add(event)
        except (OctavoError, KeyboardInterrupt):
            if has_text:
                printer.end()
            raise
    printer.end()
    completion = builder.build()
    if "logprobs" in params:
        for choice in completion.choices:
            _print_logprobs(choice)
    return completion


def _print_logprobs(choice: Choice) -> None:
    for position in choice.logprobs:
        others = " ".join(f"{token.token_id}:{token.logprob:.4f}" for token in position.top)
        chosen = position.chosen
        click.echo(f"[{choice.index}] {chosen.token_id}:{chosen.logprob:.4f}  {others}", err=True)


def _check(completion: Completion) -> None:
    """Fail if a choice ended with an error."""
    for choice in completion.choices:
        if choice.finish_reason in ("error", "cancelled"):
            why = f": {choice.error}" if choice.error else ""
            raise click.ClickException(
                f"choice {choice.index} ended with {choice.finish_reason}{why}"
            )
