"""`octavo keys`: make, list and revoke the API keys of a scheduler."""

from __future__ import annotations

import secrets
from pathlib import Path

import click

from scheduler_svc.security.keys import KeysError
from scheduler_svc.security.store import read_ring

file_option = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    envvar="OCTAVO_SCHEDULER_API_KEYS",
    show_envvar=True,
    required=True,
    metavar="FILE.toml",
    help="The file that the scheduler's --api-keys names.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Manage the API keys that a scheduler accepts.

    The file holds hashes only. A running scheduler takes changes up by itself, with the
    next call.
    """


@cli.command()
@click.option("--tenant", required=True, metavar="TENANT", help="Whom the key's calls count for.")
@click.option("--name", metavar="NAME", help="To list and revoke it by.  [default: drawn]")
@click.option("--admin", is_flag=True, help="Open the AdminService to it, which shows all tenants.")
@file_option
def new(tenant: str, name: str | None, admin: bool, path: Path) -> None:
    """Make a key and print it, this once."""
    from scheduler_svc.security.key_file import add_key

    name = name or f"key-{secrets.token_hex(4)}"
    key = add_key(path, name=name, tenant=tenant, admin=admin)
    kind = "admin key" if admin else "key"
    click.echo(f"{kind} {name!r} of tenant {tenant!r}, which nobody can show again:", err=True)
    click.echo(key)


@cli.command("list")
@file_option
def list_command(path: Path) -> None:
    """List the keys: name, tenant, kind and the begin of the hash."""
    keys = read_ring(path).keys.values()
    if not keys:
        click.echo(f"no keys in {path}: run octavo keys new", err=True)
        return
    rows = [("NAME", "TENANT", "KIND", "HASH")]
    rows += [(k.name, k.tenant, "admin" if k.admin else "user", k.hash[:19]) for k in keys]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        click.echo("  ".join([*cells, row[3]]))


@cli.command()
@click.argument("name")
@file_option
def revoke(name: str, path: Path) -> None:
    """Revoke the key NAME.

    No further call is accepted with it. Answers in progress come to their end.
    """
    from scheduler_svc.security.key_file import revoke_key

    revoke_key(path, name)
    click.echo(f"revoked {name!r}", err=True)


def main(argv: list[str] | None = None) -> int:
    """Run `octavo keys` with these arguments (default: the process's); give its exit code."""
    try:
        cli.main(args=argv, prog_name="octavo keys", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f" (see {context.command_path} --help)" if context else ""
        click.echo(f"octavo keys: {error.format_message()}{hint}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except KeysError as error:
        click.echo(f"octavo keys: {error}", err=True)
        return 1
    except OSError as error:
        click.echo(f"octavo keys: cannot change {error.filename}: {error.strerror}", err=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
