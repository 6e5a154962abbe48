"""`octavo bench`: load a server, measure it from outside."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo_client.cli._lazy import LazyGroup, ServiceCommands
from octavo_client.cli._options import connection_options
from octavo_client.cli._workload import (
    COUNT,
    FILE,
    check_outputs,
    check_vocabulary,
    check_workload_options,
    load_workload,
    run_with_progress,
    workload_options,
)

if TYPE_CHECKING:
    from rich.console import Console

    from octavo_client.bench.measure import Record, Summary
    from octavo_client.bench.memory import MemoryUse

_SERVICES = ServiceCommands(
    entry_point_group="octavo.bench_commands",
    expected={
        "attention": ("executor", "Attention on this CPU against its memory's speed."),
        "core": ("scheduler", "Cost of a scheduler step, without a network."),
        "memory": ("scheduler", "Use of the KV pool under a workload, without a model."),
    },
)
_OWN = {
    "compare": ("octavo_client.cli.bench_compare:compare", "Compare servers, turn by turn."),
}


@click.group(
    cls=LazyGroup,
    own=_OWN,
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
@connection_options
@click.option("--model", metavar="NAME", help="Model, for http. [default: the first served]")
@click.option(
    "--n",
    type=COUNT,
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
@workload_options
@click.option("--json", "json_file", metavar="FILE|-", help="Write everything as JSON.")
@click.option("--plot", "plot_file", type=FILE, metavar="FILE.png", help="Draw a plot.")
@click.option("--allow-failures", is_flag=True, help="Exit 0 even if requests failed.")
@click.pass_context
def bench(context: click.Context, /, connection: dict[str, Any], **options: Any) -> int:
    """Measure a server under load, from outside.

    Output lengths are forced and decoding is greedy. Every request's length is checked;
    exit code 1 if any is wrong, or any request failed.

    Other packages bring further benchmarks as sub-commands.
    """
    if context.invoked_subcommand is not None:
        return 0
    from rich.console import Console

    from octavo_client.bench.report import check_plotting

    check_workload_options(options)
    check_outputs(options["json_file"], options["plot_file"])
    if options["plot_file"]:
        check_plotting()
    console = Console(stderr=options["json_file"] == "-")
    return asyncio.run(_bench(options, connection, console))


async def _bench(options: dict[str, Any], connection: dict[str, Any], console: Console) -> int:
    from octavo_client.bench.measure import Slo, summarize
    from octavo_client.bench.memory import MemoryUse
    from octavo_client.bench.report import failure_lines, print_summary
    from octavo_client.bench.targets import Sampling, open_target

    requests = load_workload(options)
    sampling = Sampling(options["n"], options["beam_width"] or 0, options["timeout"])
    where, model = options["target"], options["model"]
    async with open_target(where, sampling, model=model, connection=connection) as target:
        server = await target.describe()
        check_vocabulary(requests, server)
        before = await target.snapshot()
        run = await run_with_progress(
            target,
            requests,
            num_choices=sampling.num_choices,
            concurrency=options["concurrency"],
        )
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
