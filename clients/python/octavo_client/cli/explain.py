"""`octavo explain`: what happened to a request, and where its time went."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from octavo_client.cli._options import connection_options, target_option
from octavo_client.cli._words import counted, duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo_client import Explanation, RequestEvent
    from octavo_client._story import Span

_BAR_CHARS = 40
_PHASES = {
    "queued": ("waits in the queue, behind others", "bright_black"),
    "blocked": ("next in the queue, without room", "yellow"),
    "prefill": ("its prompt is computed", "cyan"),
    "decode": ("tokens are generated", "green"),
    "preempted": ("its blocks went to others", "red"),
    "moved": ("lost its executor, waits for another", "magenta"),
}
_STYLES = {
    "blocked": "yellow",
    "preempted_recompute": "red",
    "preempted_swap": "red",
    "executor_lost": "magenta",
    "moved": "magenta",
    "finished": "green",
}


@click.command()
@click.argument("request_id")
@target_option
@connection_options
@click.option("--json", "as_json", is_flag=True, help="Print the story as JSON.")
def explain(*, request_id: str, target: str, connection: dict[str, Any], as_json: bool) -> None:
    """Tell what happened to REQUEST_ID, and where its time went.

    The id is the one in Started, in the scheduler's log, in `octavo top` and in the console;
    an answer of the gateway has it as its id, with .0 behind it for its first prompt. Where
    there are API keys it takes an administrator's.
    """
    from octavo_client import Client, NotFound
    from octavo_client._story import spans_of

    with Client(target, **connection) as client:
        try:
            story = client.explain(request_id)
        except NotFound as error:
            raise click.ClickException(_hinted(request_id, error)) from None
    spans = spans_of(story.events, time.time_ns())
    if as_json:
        click.echo(json.dumps(_as_json(story, spans), ensure_ascii=False, indent=2))
    else:
        for line in tell(story, spans):
            click.echo(line)


def _hinted(request_id: str, error: Exception) -> str:
    hint = ""
    if request_id.startswith(("cmpl-", "chatcmpl-")) and "." not in request_id:
        hint = f" Answers of the gateway have one id for each prompt: try {request_id}.0"
    return f"{str(error).rstrip('.')}.{hint}"


def _as_json(story: Explanation, spans: Sequence[Span]) -> dict[str, Any]:
    from octavo_client._story import seconds_by_phase

    return {**asdict(story), "seconds_by_phase": seconds_by_phase(spans)}


def tell(story: Explanation, spans: Sequence[Span]) -> list[str]:
    """Give the story as lines: who, the events, and where the time went."""
    lines = [click.style(story.request_id, bold=True), f"  {_summary(story)}", ""]
    begin = story.events[0].time_unix_ns if story.events else 0
    executor = ""
    half = len(story.events) // 2 if story.num_events_dropped else -1
    for number, event in enumerate(story.events):
        if number == half:
            dropped = counted(story.num_events_dropped, "more event")
            lines.append(f"{'':>11}  … {dropped} in between, not kept")
        at = duration((event.time_unix_ns - begin) / 1e9) if number else "0"
        name = str(event.kind).replace("_", " ")
        styled = click.style(f"{name:<20}", fg=_STYLES.get(event.kind))
        lines.append(f"{at:>11}  {styled} {_words(event, story, executor)}".rstrip())
        executor = event.executor or executor
    return [*lines, "", *_where(spans, story)]


def _summary(story: Explanation) -> str:
    parts = [
        f"tenant {story.tenant}" if story.tenant else "no tenant",
        f"priority {story.priority}",
        counted(story.num_prompt_tokens, "prompt token"),
        f"{counted(story.num_generated_tokens, 'token')} generated",
    ]
    if story.trace_id:
        parts.append(f"trace {story.trace_id}")
    return " · ".join(parts)


def _words(event: RequestEvent, story: Explanation, executor: str) -> str:
    """Say what an event's fields mean for its kind; `executor` is known from the ones before."""
    on = f"on {event.executor}" if event.executor not in ("", executor) else ""
    other = f"for {event.other_request_id}" if event.other_request_id else ""
    tokens = counted(event.num_tokens, "token")
    match event.kind:
        case "blocked":
            holder = event.other_request_id
            parts = [f"{holder} holds the most" if holder else "", on]
        case "admitted":
            cached = f"{event.num_tokens} of {story.num_prompt_tokens} prompt tokens cached"
            parts = [on, cached]
        case "preempted_recompute":
            parts = [other, f"{tokens} to compute again", on]
        case "preempted_swap":
            parts = [other, f"{tokens} to the host's memory", on]
        case "executor_lost" | "moved":
            parts = [event.executor]
        case "finished":
            parts = [tokens, on]
        case _:
            parts = [other, on]
    return ", ".join(part for part in (event.detail, *parts) if part)


def _where(spans: Sequence[Span], story: Explanation) -> list[str]:
    from octavo_client._story import has_ended, seconds_by_phase

    sums = seconds_by_phase(spans)
    total = sum(sums.values())
    if not total:
        return ["it took no time yet"]
    so_far = "" if has_ended(story.events) else " so far"
    about = ", about: events are missing" if story.num_events_dropped else ""
    lines = [f"Where {duration(total)} went{so_far}{about}", f"  {_bar(spans, total)}"]
    for phase, seconds in sums.items():
        if seconds:
            meaning, colour = _PHASES[phase]
            name = click.style(f"{phase:<10}", fg=colour)
            share = f"{seconds / total:.1%}"
            lines.append(f"  {name} {duration(seconds):>10}  {share:>6}  {meaning}")
    return lines


def _bar(spans: Sequence[Span], total: float) -> str:
    """Draw the phases in order; where one has less than a character it is left out."""
    letters = {"queued": "░", "blocked": "▒", "prefill": "▓", "decode": "█", "preempted": "▚"}
    bar, done, drawn = "", 0.0, 0
    for span in spans:
        done += span.seconds
        end = round(_BAR_CHARS * done / total)
        letter = letters.get(span.phase, "»")
        bar += click.style(letter * (end - drawn), fg=_PHASES[span.phase][1])
        drawn = max(drawn, end)
    return bar
