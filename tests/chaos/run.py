"""Break a running stack at random times, and require that no stream notices.

    python -P tests/chaos/run.py --faults 200 --seconds 780 --seed 5 --json FILE --plot FILE

Two executors with the sanitizer, two schedulers and a gateway, all real processes, with a
breakable link between any two, and clients that compare every answer, token for token, with the
one that they got before anything was broken. Exit status 1 if anything is off.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.append(str(Path(__file__).parents[2]))

from tests.chaos.chaos import Chaos, Report, Settings
from tests.chaos.faults import Pace
from tests.chaos.report import print_report, write_json, write_plot


def main(argv: list[str] | None = None) -> int:
    """Run with these flags; 1 if anything is off."""
    options = _parser().parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    settings = Settings(
        seed=seed,
        pace=Pace(options.faults, options.seconds, longest_seconds=options.longest),
        num_clients=options.clients,
        num_http_clients=options.http_clients,
        model=options.model,
        logs=options.logs,
        layout={"scheduler_flags": tuple(options.scheduler_flags.split())},
    )
    console = Console(stderr=True)
    console.print(f"seed {seed}: the same faults again with --seed {seed}")
    report = asyncio.run(_run(settings, console))
    print_report(report, console)
    if options.json is not None:
        write_json(report, options.json)
    if options.plot is not None:
        write_plot(report, options.plot)
    return 1 if report.problems else 0


async def _run(settings: Settings, console: Console) -> Report:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("faults"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[seen]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("breaking", total=settings.pace.num_faults, seen="starting")

        def show() -> None:
            ledger = chaos.report.ledger
            seen = (
                f"{ledger.num_streams.total()} streams, {ledger.num_tokens} tokens, "
                f"{len(ledger.problems)} problems"
            )
            progress.update(task, completed=len(ledger.faults), seen=seen)

        chaos = Chaos(settings, on_fault=show)
        return await chaos.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Break a running stack at random times.")
    add = parser.add_argument
    add("--faults", type=int, default=200, metavar="N", help="how many [200]")
    add("--seconds", type=float, default=780.0, help="in which they begin [780]")
    add("--seed", type=int, help="of faults and clients [drawn, and printed]")
    add("--clients", type=int, default=32, metavar="N", help="of the SDK [32]")
    add("--http-clients", type=int, default=3, metavar="N", help="of the gateway [3]")
    add("--longest", type=float, default=20.0, metavar="SECONDS", help="of a fault [20]")
    add("--model", type=Path, metavar="FOLDER", help="[a small one of random weights]")
    add(
        "--scheduler-flags",
        default="",
        metavar="FLAGS",
        help="further ones, such as --scheduler-flags='--orphan-timeout-seconds 5'",
    )
    add("--logs", type=Path, metavar="FOLDER", help="of the services [a temporary one]")
    add("--json", type=Path, metavar="FILE", help="write all counts there")
    add("--plot", type=Path, metavar="FILE", help="draw tokens per second and faults there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
