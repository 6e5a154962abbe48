"""What `bench` and `bench compare` share: which workload, how it is sent, a progress bar."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from octavo_client.bench.measure import Record
    from octavo_client.bench.run import Run
    from octavo_client.bench.targets import Target
    from octavo_client.bench.workload import Request

_F = TypeVar("_F", bound=Callable[..., Any])

POSITIVE = click.FloatRange(min=0, min_open=True)
COUNT = click.IntRange(min=1)
FILE = click.Path(path_type=Path, dir_okay=False)

_OPTIONS = (
    click.option(
        "--requests",
        "requests_file",
        type=FILE,
        metavar="FILE.json",
        help="Workload: [{id, prompt: [token ids], out, arrival}].",
    ),
    click.option(
        "--trace",
        "trace_file",
        type=FILE,
        metavar="FILE.csv[.gz]",
        help="Workload: arrival_s, prompt_tokens, output_tokens; the prompts are drawn.",
    ),
    click.option(
        "--max-requests",
        type=COUNT,
        metavar="N",
        help="At most so many. [default: all; 64 without a workload file, whose lengths "
        "are then drawn as ShareGPT's]",
    ),
    click.option("--max-prompt", type=COUNT, metavar="TOKENS", help="Cut prompts to this length."),
    click.option("--max-output", type=COUNT, metavar="TOKENS", help="Cut outputs to this length."),
    click.option(
        "--rate",
        type=POSITIVE,
        metavar="REQ/S",
        help="Poisson arrivals at this rate. [default: the workload's own arrivals]",
    ),
    click.option("--at-once", is_flag=True, help="Send everything at the start."),
    click.option(
        "--rate-scale",
        type=POSITIVE,
        default=1.0,
        show_default=True,
        metavar="FACTOR",
        help="Send so many times faster than the arrivals say.",
    ),
    click.option(
        "--concurrency",
        type=COUNT,
        metavar="N",
        help="Most requests at the server at once. [default: no bound]",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="For all that is drawn."),
    click.option(
        "--vocab-size",
        type=COUNT,
        default=30_000,
        show_default=True,
        metavar="TOKENS",
        help="Drawn token ids are below this.",
    ),
    click.option(
        "--timeout",
        type=POSITIVE,
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="Deadline of each request.",
    ),
    click.option(
        "--slo-ttft",
        type=POSITIVE,
        default=2.0,
        show_default=True,
        metavar="SECONDS",
        help="Goodput counts requests with at most this TTFT ...",
    ),
    click.option(
        "--slo-itl",
        type=POSITIVE,
        default=0.2,
        show_default=True,
        metavar="SECONDS",
        help="... and at most this mean ITL.",
    ),
)


def workload_options(function: _F) -> _F:
    """Options that say what is sent and when; `load_workload` reads them."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def check_workload_options(options: dict[str, Any]) -> None:
    """Refuse options that contradict each other."""
    if options["requests_file"] and options["trace_file"]:
        raise click.UsageError("give one of --requests and --trace, not both")
    if options["rate"] and options["at_once"]:
        raise click.UsageError("give one of --rate and --at-once, not both")


def check_outputs(*files: str | Path | None) -> None:
    """Refuse files that could not be written when all is done; None and - are no files."""
    for file in files:
        if file is None or str(file) == "-":
            continue
        place = Path(file) if Path(file).exists() else Path(file).absolute().parent
        if Path(file).is_dir() or not os.access(place, os.W_OK):
            raise click.UsageError(f"cannot write to {file}")


def load_workload(options: dict[str, Any]) -> list[Request]:
    """Read or draw the workload, and fit it to the options."""
    from octavo_client.bench import workload

    limit, seed, vocab_size = options["max_requests"], options["seed"], options["vocab_size"]
    if options["requests_file"]:
        requests = workload.read_requests(options["requests_file"])[:limit]
    elif options["trace_file"]:
        requests = workload.read_trace(
            options["trace_file"], max_requests=limit, vocab_size=vocab_size, seed=seed
        )
    else:
        requests = workload.draw_sharegpt(
            num_requests=limit or 64, vocab_size=vocab_size, seed=seed
        )
    requests = workload.cap_lengths(
        requests, max_prompt=options["max_prompt"], max_output=options["max_output"]
    )
    if options["rate"]:
        requests = workload.poisson_arrivals(requests, options["rate"], seed=seed)
    factor = math.inf if options["at_once"] else options["rate_scale"]
    return workload.scale_arrivals(requests, factor)


def check_vocabulary(requests: Sequence[Request], server: dict[str, Any]) -> None:
    """Refuse to send tokens that the model does not have.

    Raises:
        WorkloadError: if there are any, and the server says how many tokens it has.
    """
    from octavo_client.bench.workload import WorkloadError

    size = server.get("vocab_size")
    largest = max(max(request.prompt) for request in requests)
    if size is not None and largest >= size:
        raise WorkloadError(
            f"the workload has token id {largest}, and {server['model']} only {size} tokens: "
            "use a workload for this model, or a smaller --vocab-size"
        )


async def run_with_progress(
    target: Target,
    requests: Sequence[Request],
    *,
    num_choices: int = 1,
    concurrency: int | None = None,
    label: str = "",
) -> Run:
    """Run under a progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from octavo_client.bench.run import run_workload

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    console = Console(stderr=True)
    num_tokens = num_failed = 0
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task(label, total=len(requests))

        def on_end(record: Record) -> None:
            nonlocal num_tokens, num_failed
            num_tokens += record.num_received
            num_failed += record.error is not None
            failed = f", {num_failed} failed" if num_failed else ""
            words = f"{label} {num_tokens:,} tokens{failed}".lstrip()
            progress.update(bar, advance=1, description=words)

        return await run_workload(
            target,
            requests,
            num_choices=num_choices,
            concurrency=concurrency,
            on_end=on_end,
        )
