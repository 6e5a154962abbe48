"""`octavo bench compare`: several servers, one workload, turn by turn."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo_client.cli._workload import (
    FILE,
    check_outputs,
    check_vocabulary,
    check_workload_options,
    load_workload,
    run_with_progress,
    workload_options,
)

if TYPE_CHECKING:
    from octavo_client.bench.compare import Comparison, Load, Peer, Turn
    from octavo_client.bench.compare_recipe import Recipe
    from octavo_client.bench.run import Run
    from octavo_client.bench.targets import Target
    from octavo_client.bench.workload import Request

_WIDE = 240  # columns, where no terminal bounds them


@click.command()
@click.option(
    "--peer",
    "--target",
    "peers",
    multiple=True,
    required=True,
    metavar="[NAME=]RECIPE.toml|NAME=URL",
    help="Who takes part, in this order: a recipe, which is started for its turn and "
    "stopped after it; or a server that runs already, by grpc:// or http://. Repeat it. "
    "Ratios are to the first.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="[NAME.]KEY=VALUE",
    help="Change a value of every recipe that has it, or of the peer NAME alone; repeat it.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1, max=1000),
    default=3,
    show_default=True,
    metavar="N",
    help="Turns of each peer.",
)
@click.option("--no-warm-up", is_flag=True, help="Send no short request before the workload.")
@workload_options
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of NAME.log of each recipe. [default: a temporary one, kept only after a failure]",
)
@click.option("--json", "json_file", metavar="FILE|-", help="Write everything as JSON.")
@click.option("--plot", "plot_file", type=FILE, metavar="FILE.png", help="Draw a plot.")
@click.option("--allow-failures", is_flag=True, help="Exit 0 even if requests failed.")
def compare(**options: Any) -> int:
    """Compare servers on this machine: one workload, turn by turn, A B A B ….

    Shows medians over the rounds, and ratios to the first peer. Output lengths are forced
    and decoding is greedy, as in `octavo bench`.

    Exit code 1 if a peer failed or any request came back wrong; the others' figures are
    shown all the same. Ctrl-C stops what was started.
    """
    from octavo_client.bench.report import check_plotting

    check_workload_options(options)
    check_outputs(options["json_file"], options["plot_file"])
    if options["plot_file"]:
        check_plotting()
    entrants = _parse_entrants(options["peers"], options["settings"])
    try:
        return asyncio.run(_compare(entrants, options))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


def _parse_entrants(
    peers: Sequence[str], settings: Sequence[str]
) -> dict[str, Recipe | str]:  # a recipe, or the URL of a server that runs
    """Read --peer and --set; every setting must change something."""
    from octavo_client.bench.compare_recipe import read_recipe

    pairs = [_parse_setting(text) for text in settings]
    unused = {key for key, _ in pairs}
    entrants: dict[str, Recipe | str] = {}
    for text in peers:
        name, where = _parse_peer(text)
        if name in entrants:
            raise click.UsageError(f"--peer: two are named {name!r}: put NAME= before one")
        if "://" in where:
            entrants[name] = where
            continue
        pairs.sort(key=lambda pair: pair[0].startswith(f"{name}."))  # its own win
        mine = {key.removeprefix(f"{name}."): (key, value) for key, value in pairs}
        recipe = read_recipe(Path(where), {key: value for key, (_, value) in mine.items()})
        unused -= {mine[key][0] for key in recipe.values if key in mine}
        entrants[name] = recipe
    if unused:
        raise click.UsageError(f"--set: no recipe has a value {sorted(unused)[0]!r}")
    return entrants


def _parse_peer(text: str) -> tuple[str, str]:
    """Split [NAME=]RECIPE.toml or NAME=URL."""
    name, separator, where = text.partition("=")
    if not separator and text.endswith(".toml"):
        return Path(text).stem, text
    is_known = where.endswith(".toml") or where.startswith(("grpc://", "http://", "https://"))
    if not name or not is_known:
        raise click.UsageError(
            f"--peer must be [NAME=]RECIPE.toml, or NAME= and a URL of grpc:// or http://, "
            f"got {text!r}"
        )
    return name, where


def _parse_setting(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise click.UsageError(f"--set must be [NAME.]KEY=VALUE, got {text!r}")
    return key, value


async def _compare(entrants: dict[str, Recipe | str], options: dict[str, Any]) -> int:
    from octavo_client.bench.compare import Comparison
    from octavo_client.bench.compare import compare as run_rounds

    load = _load(options)
    log_dir = options["log_dir"] or Path(tempfile.mkdtemp(prefix="octavo-compare-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    keeps_logs = True
    peers = _peers(entrants, log_dir)
    comparison = Comparison.of(peers)
    try:
        await run_rounds(
            peers,
            load,
            num_rounds=options["rounds"],
            on_start=lambda number, name: _say(f"round {number}/{options['rounds']}: {name}"),
            on_wait=lambda what: _say(f"  {what}"),
            on_end=lambda _, turn: _say_turn(turn),
            into=comparison,
        )
        keeps_logs = comparison.has_failed or comparison.num_bad > 0
    except asyncio.CancelledError:
        if not comparison.is_empty:
            _say("interrupted; these turns had ended:")
            _report(comparison, entrants, options, len(load.requests))
        raise
    finally:
        if options["log_dir"] is None and not keeps_logs:
            shutil.rmtree(log_dir, ignore_errors=True)
        else:
            _say(f"logs in {log_dir}")
    _report(comparison, entrants, options, len(load.requests))
    return _exit_code(comparison, allows_failures=options["allow_failures"])


def _load(options: dict[str, Any]) -> Load:
    from octavo_client.bench.compare import Load, warm_up_for
    from octavo_client.bench.measure import Slo

    requests = load_workload(options)

    async def send(target: Target, requests: Sequence[Request]) -> Run:
        return await run_with_progress(target, requests, concurrency=options["concurrency"])

    return Load(
        requests=requests,
        warm_up=[] if options["no_warm_up"] else warm_up_for(requests),
        slo=Slo(options["slo_ttft"], options["slo_itl"]),
        timeout_seconds=options["timeout"],
        send=send,
        check=check_vocabulary,
    )


def _peers(entrants: dict[str, Recipe | str], log_dir: Path) -> list[Peer]:
    from octavo_client.bench.compare_peers import RunningPeer, recipe_peer

    return [
        RunningPeer(name, found) if isinstance(found, str) else recipe_peer(name, found, log_dir)
        for name, found in entrants.items()
    ]


def _say(line: str) -> None:
    click.echo(line, err=True)


def _say_turn(turn: Turn) -> None:
    """How a turn went, in one line."""
    if turn.summary is None:
        _say(f"  failed: {turn.error}")
        return
    for failure in turn.failures:
        _say(f"  failed: {failure}")
    _say(
        f"  {turn.summary.output_tokens_per_second:,.1f} output tokens/s in "
        f"{turn.summary.duration:.1f} s, {turn.num_bad} requests failed or of a wrong length"
    )


def _report(
    comparison: Comparison,
    entrants: dict[str, Recipe | str],
    options: dict[str, Any],
    num_requests: int,
) -> None:
    """Print the table; write JSON and plot, as asked."""
    from rich.console import Console

    from octavo_client.bench.compare_table import plot, print_table, to_json

    title = f"{num_requests} requests, {options['rounds']} round(s)"
    title += f"; x is the ratio to {comparison.names[0]}" if len(comparison.names) > 1 else ""
    console = Console(stderr=options["json_file"] == "-")
    if not console.is_terminal:
        console.width = _WIDE
    print_table(comparison, console, title=title)
    if options["json_file"]:
        recipes = {
            name: json.loads(json.dumps(asdict(found), default=str))
            for name, found in entrants.items()
            if not isinstance(found, str)
        }
        config = json.loads(json.dumps(options, default=str))
        text = to_json(comparison, config=config, recipes=recipes)
        if options["json_file"] == "-":
            sys.stdout.write(text + "\n")
        else:
            Path(options["json_file"]).write_text(text + "\n", encoding="utf-8")
    if options["plot_file"]:
        plot(comparison, options["plot_file"], title=title.partition(";")[0])


def _exit_code(comparison: Comparison, *, allows_failures: bool) -> int:
    """Fail if a peer failed, or requests came back wrong."""
    failed = [
        name
        for name, turns in comparison.turns.items()
        if any(turn.error is not None for turn in turns)
    ]
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")
    if comparison.num_bad and not allows_failures:
        raise click.ClickException(
            f"{comparison.num_bad} requests failed or came back with the wrong length"
        )
    return 0
