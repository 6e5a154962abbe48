"""`octavo demo`: the whole system on this machine, for as long as eight streams take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo_client._process import LocalError
from octavo_client.cli._demo_view import (
    DemoState,
    DemoStream,
    DemoView,
    demo_view,
    print_table,
    screen_svg,
)
from octavo_client.cli._options import stack_options
from octavo_client.cli._stack import local_options, running_stack, show_log_tail, stderr_console

if TYPE_CHECKING:
    from rich.console import Console

    from octavo_client import AsyncClient, Snapshot
    from octavo_client._local import LocalOptions

_SETTLE_SECONDS = 5.0
_BLOCK_SIZE = 16  # the executor's default, tokens
_POOL_TOKENS_PER_TOKEN = 16  # of --max-tokens: eleven sequences and their prompts fill most

# Title, prompt, parameters: eight kinds of work that really meet in one server.
_PROMPTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("story", "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
     {"temperature": 0.7, "seed": 1}),
    ("code", "Write a Python function that returns the n-th Fibonacci number. Explain it.",
     {"temperature": 0.0}),
    ("math", "A train leaves at 9:40 and arrives at 12:15. How long does the journey take? "
     "Think step by step.", {"temperature": 0.0}),
    ("translation", "Translate into French: 'The library opens at nine; tea is served at four.'",
     {"temperature": 0.0}),
    ("advice", "I slept badly before an important day. Give me five tips to get through it.",
     {"temperature": 0.6, "seed": 2}),
    ("facts", "What causes the seasons on Earth? Answer in one paragraph.", {"temperature": 0.0}),
    ("names, n = 4", "Suggest one name for a bakery by the sea, with a short slogan.",
     {"temperature": 0.7, "seed": 7, "n": 4, "max_tokens": 40}),
    ("summary", "Summarize in two sentences: Books were once printed on large sheets, which were "
     "folded into gatherings of leaves. A sheet folded three times gives eight leaves, sixteen "
     "pages, and is called an octavo. Smaller formats made books cheaper and easier to carry.",
     {"temperature": 0.0}),
)  # fmt: skip


@click.command()
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True,
              metavar="TOKENS", help="Most tokens per stream.")  # fmt: skip
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.svg",
              help="Also save the screen, as it is half-way, as an SVG picture.")  # fmt: skip
@stack_options
def demo(max_tokens: int, picture: Path | None, **flags: Any) -> int:
    """Serve on free ports, stream eight prompts at once, check the pool, stop.

    Without --num-blocks the pool is small, so that its bar shows something.
    Exit code 0 means that every stream finished and every KV block came back.
    """
    if flags["num_blocks"] is None:
        pool_tokens = _POOL_TOKENS_PER_TOKEN * max(max_tokens, 128)
        flags["num_blocks"] = -(-pool_tokens // (flags["block_size"] or _BLOCK_SIZE))
    options = local_options(listen="127.0.0.1:0", **flags)
    return asyncio.run(_demo(options, max_tokens, picture))


async def _demo(options: LocalOptions, max_tokens: int, picture: Path | None) -> int:
    from rich.console import Console

    from octavo_client import AsyncClient

    console, errors = Console(highlight=False), stderr_console()
    try:
        async with running_stack(options, errors) as stack:
            message = f"ready at {stack.target} after {stack.ready_seconds:.1f} s"
            errors.print(message, style="dim", highlight=False)
            run = _run(AsyncClient(f"grpc://{stack.target}"), max_tokens, console, picture)
            work = asyncio.ensure_future(run)
            death = asyncio.ensure_future(stack.wait())
            try:
                await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    await death
                problem = await work
            finally:
                await _cancel(work, death)
            if problem:
                raise click.ClickException(problem)
    except LocalError as error:
        show_log_tail(error, errors)
        raise
    console.print("every stream finished, every block came back", style="green")
    return 0


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _run(client: AsyncClient, max_tokens: int, console: Console, picture: Path | None) -> str:
    """Stream all prompts and show them; return what is wrong, or ""."""
    async with client:
        model = await client.model()
        state = DemoState([DemoStream(title) for title, _, _ in _PROMPTS])
        before = _counters(await client.snapshot())
        watching = asyncio.create_task(_watch(client, state))
        drawing = asyncio.create_task(_draw_half_way(state, max_tokens, picture))
        begin = time.monotonic()
        try:
            with demo_view(state, console) as view:
                async with asyncio.TaskGroup() as group:
                    for stream, (_, prompt, params) in zip(state.streams, _PROMPTS, strict=True):
                        arguments = {
                            "max_tokens": max_tokens,
                            **_source(prompt, chat=model.has_chat_template),
                            **params,
                        }
                        arguments["max_tokens"] = min(max_tokens, arguments["max_tokens"])
                        group.create_task(_stream(client, stream, arguments, view))
                state.seconds = time.monotonic() - begin
        finally:
            await _cancel(watching, drawing)
        settled, problem = await _settle(client)
        after = _counters(settled)
        allocated = after[1] - before[1]
        use = (after[0] - before[0]) / allocated if allocated else 0.0
        print_table(state, use, console)
        failed = [stream for stream in state.streams if stream.error]
        if failed:
            return f"stream {failed[0].title!r} failed: {failed[0].error}"
        return problem


def _source(prompt: str, *, chat: bool) -> dict[str, Any]:
    if not chat:
        return {"prompt": prompt}
    return {"messages": [{"role": "user", "content": prompt}]}


async def _stream(
    client: AsyncClient, stream: DemoStream, arguments: dict[str, Any], view: DemoView
) -> None:
    """Follow one stream to its end."""
    from octavo_client import Delta, Finished, OctavoError

    stream.begin = time.monotonic()
    try:
        async with client.stream(**arguments) as events:
            async for event in events:
                if isinstance(event, Delta):
                    stream.add(event.index, event.text, len(event.token_ids))
                elif isinstance(event, Finished):
                    stream.finish(event.reason, event.error)
    except OctavoError as error:
        stream.error = " ".join(f"{type(error).__name__}: {error}".split())
    stream.end = time.monotonic()
    view.ended(stream)


async def _watch(client: AsyncClient, state: DemoState) -> None:
    """Keep the pool's figures current; without them the demo goes on."""
    from octavo_client import OctavoError

    with contextlib.suppress(OctavoError):
        async for snapshot in client.watch(interval=0.1):
            state.pools = [executor.pool for executor in snapshot.executors]
            in_use = sum(pool.num_referenced for pool in state.pools)
            state.peak_blocks = max(state.peak_blocks, in_use)


async def _draw_half_way(state: DemoState, max_tokens: int, picture: Path | None) -> None:
    """Save the screen once most streams are half done."""
    while picture is not None:
        halves = sum(stream.num_tokens * 2 >= max_tokens for stream in state.streams)
        if 2 * halves > len(state.streams):
            _save(picture, screen_svg(state))
            return
        await asyncio.sleep(0.05)


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error


def _counters(snapshot: Snapshot) -> tuple[int, int]:
    """Sums over steps: slots that held a token, and slots that were allocated."""
    counters = [executor.counters for executor in snapshot.executors]
    return (
        sum(each.live_slot_steps for each in counters),
        sum(each.allocated_slot_steps for each in counters),
    )


async def _settle(client: AsyncClient) -> tuple[Snapshot, str]:
    """Wait until no block is held any more; return the last state, and what is wrong."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while True:
        snapshot = await client.snapshot()
        held = sum(executor.pool.num_referenced for executor in snapshot.executors)
        if held == 0:
            return snapshot, ""
        if time.monotonic() > deadline:
            return snapshot, f"{held} blocks are still held after every stream ended"
        await asyncio.sleep(0.05)
