"""`octavo bench`: load a server, measure it from outside."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo_client.cli._lazy import LazyGroup, ServiceCommands

if TYPE_CHECKING:
    from rich.console import Console

    from octavo_client.bench.measure import Record, Summary
    from octavo_client.bench.memory import MemoryUse
    from octavo_client.bench.run import Run
    from octavo_client.bench.targets import Sampling
    from octavo_client.bench.workload import Request

_SERVICES = ServiceCommands(
    entry_point_group="octavo.bench_commands",
    expected={
        "core": ("scheduler", "Cost of a scheduler step, without a network."),
        "memory": ("scheduler", "Use of the KV pool under a workload, without a model."),
    },
)
_POSITIVE = click.FloatRange(min=0, min_open=True)
_COUNT = click.IntRange(min=1)
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group(
    cls=LazyGroup,
    own={},
    services=_SERVICES,
    invoke_without_command=True,
    subcommand_metavar="[COMMAND [ARGS]...]",
)
@click.option(
    "--target",
    default="grpc://127.0.0.1:50051",
    envvar="OCTAVO_TARGET",
    show_default=True,
    show_envvar=True,
    metavar="URL",
    help="grpc://HOST:PORT (Octavo) or http://HOST:PORT[/v1] (OpenAI completions).",
)
@click.option("--model", metavar="NAME", help="Model, for http. [default: the first served]")
@click.option(
    "--requests",
    "requests_file",
    type=_FILE,
    metavar="FILE.json",
    help="Workload: [{id, prompt: [token ids], out, arrival}].",
)
@click.option(
    "--trace",
    "trace_file",
    type=_FILE,
    metavar="FILE.csv[.gz]",
    help="Workload: arrival_s, prompt_tokens, output_tokens; the prompts are drawn.",
)
@click.option(
    "--max-requests",
    type=_COUNT,
    metavar="N",
    help="At most so many. [default: all; 64 without a workload file, whose lengths "
    "are then drawn as ShareGPT's]",
)
@click.option("--max-prompt", type=_COUNT, metavar="TOKENS", help="Cut prompts to this length.")
@click.option("--max-output", type=_COUNT, metavar="TOKENS", help="Cut outputs to this length.")
@click.option(
    "--rate",
    type=_POSITIVE,
    metavar="REQ/S",
    help="Poisson arrivals at this rate. [default: the workload's own arrivals]",
)
@click.option("--at-once", is_flag=True, help="Send everything at the start.")
@click.option(
    "--rate-scale",
    type=_POSITIVE,
    default=1.0,
    show_default=True,
    metavar="FACTOR",
    help="Send so many times faster than the arrivals say.",
)
@click.option(
    "--concurrency",
    type=_COUNT,
    metavar="N",
    help="Most requests at the server at once. [default: no bound]",
)
@click.option(
    "--n",
    type=_COUNT,
    default=1,
    show_default=True,
    metavar="N",
    help="Choices per request; above 1 they are sampled, at temperature 1.",
)
@click.option(
    "--beam-width",
    type=click.IntRange(min=2),
    metavar="WIDTH",
    help="Beam search of this width; returns --n beams.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="For all that is drawn.")
@click.option(
    "--vocab-size",
    type=_COUNT,
    default=30_000,
    show_default=True,
    metavar="TOKENS",
    help="Drawn token ids are below this.",
)
@click.option(
    "--timeout",
    type=_POSITIVE,
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="Deadline of each request.",
)
@click.option(
    "--slo-ttft",
    type=_POSITIVE,
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Goodput counts requests with at most this TTFT ...",
)
@click.option(
    "--slo-itl",
    type=_POSITIVE,
    default=0.2,
    show_default=True,
    metavar="SECONDS",
    help="... and at most this mean ITL.",
)
@click.option("--json", "json_file", metavar="FILE|-", help="Write everything as JSON.")
@click.option("--plot", "plot_file", type=_FILE, metavar="FILE.png", help="Draw a plot.")
@click.option("--allow-failures", is_flag=True, help="Exit 0 even if requests failed.")
@click.pass_context
def bench(context: click.Context, /, **options: Any) -> int:
    """Measure a server under load, from outside.

    Output lengths are forced and decoding is greedy. Every request's length is checked;
    exit code 1 if any is wrong, or any request failed.

    Other packages bring further benchmarks as sub-commands.
    """
    if context.invoked_subcommand is not None:
        return 0
    from rich.console import Console

    from octavo_client.bench.report import check_plotting

    if options["requests_file"] and options["trace_file"]:
        raise click.UsageError("give one of --requests and --trace, not both")
    if options["rate"] and options["at_once"]:
        raise click.UsageError("give one of --rate and --at-once, not both")
    if options["plot_file"]:
        check_plotting()
    console = Console(stderr=options["json_file"] == "-")
    return asyncio.run(_bench(options, console))


async def _bench(options: dict[str, Any], console: Console) -> int:
    from octavo_client.bench.measure import Slo, summarize
    from octavo_client.bench.memory import MemoryUse
    from octavo_client.bench.report import failure_lines, print_summary
    from octavo_client.bench.targets import Sampling, open_target

    requests = _load(options)
    sampling = Sampling(options["n"], options["beam_width"] or 0, options["timeout"])
    async with open_target(options["target"], sampling, model=options["model"]) as target:
        server = await target.describe()
        _check_vocabulary(requests, server)
        before = await target.snapshot()
        run = await _run_with_progress(target, requests, options, sampling)
        after = await target.snapshot()
    memory = MemoryUse.between(before, after) if before and after else None
    slo = Slo(options["slo_ttft"], options["slo_itl"])
    summary = summarize(run.records, slo, max_send_lag=run.max_send_lag)
    title = f"{options['target']}  {server['model']}"
    print_summary(summary, console, title=title)
    if memory is not None:
        console.print(memory.line(), highlight=False, soft_wrap=True)
    for line in failure_lines(run.records):
        click.echo(f"failed: {line}", err=True)
    _write(options, summary, run.records, server=server, memory=memory, title=title)
    if summary.num_wrong_length or (summary.num_failed and not options["allow_failures"]):
        raise click.ClickException(
            f"{summary.num_failed} requests failed, "
            f"{summary.num_wrong_length} came back with the wrong length"
        )
    return 0


def _load(options: dict[str, Any]) -> list[Request]:
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


def _check_vocabulary(requests: list[Request], server: dict[str, Any]) -> None:
    """Refuse to send tokens that the model does not have."""
    size = server.get("vocab_size")
    largest = max(max(request.prompt) for request in requests)
    if size is not None and largest >= size:
        raise click.ClickException(
            f"the workload has token id {largest}, and {server['model']} only {size} tokens: "
            "use a workload for this model, or a smaller --vocab-size"
        )


async def _run_with_progress(
    target: Any, requests: list[Request], options: dict[str, Any], sampling: Sampling
) -> Run:
    """Run under a progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from octavo_client.bench.run import run_workload

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    num_tokens = num_failed = 0
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=len(requests))

        def on_end(record: Record) -> None:
            nonlocal num_tokens, num_failed
            num_tokens += record.num_received
            num_failed += record.error is not None
            failed = f", {num_failed} failed" if num_failed else ""
            progress.update(bar, advance=1, description=f"{num_tokens:,} tokens{failed}")

        return await run_workload(
            target,
            requests,
            num_choices=sampling.num_choices,
            concurrency=options["concurrency"],
            on_end=on_end,
        )


def _write(
    options: dict[str, Any],
    summary: Summary,
    records: list[Record],
    *,
    server: dict[str, Any],
    memory: MemoryUse | None,
    title: str,
) -> None:
    """Write JSON and plot, as asked."""
    from octavo_client.bench.report import plot, to_json

    if options["json_file"]:
        config = json.loads(json.dumps(options, default=str))
        text = to_json(summary, records, config=config, server=server, memory=memory)
        if options["json_file"] == "-":
            sys.stdout.write(text + "\n")
        else:
            Path(options["json_file"]).write_text(text + "\n", encoding="utf-8")
    if options["plot_file"]:
        plot(records, options["plot_file"], title=title)
