"""Groups whose sub-commands load when they are called, not when help is shown."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click


@dataclass(frozen=True, slots=True)
class ServiceCommands:
    """Sub-commands that other packages bring by entry points: `main(argv) -> int`.

    Attributes:
        entry_point_group: where they are registered.
        expected: name -> (extra of the octavo distribution that brings it, short help),
            so that a missing one can say how to install it.
    """

    entry_point_group: str
    expected: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def names(self) -> list[str]:
        """All names, installed or expected."""
        return sorted({*self.expected, *(point.name for point in self._points())})

    def help(self, name: str) -> str:
        """One line for a listing."""
        return self.expected.get(name, ("", f"From {self.entry_point_group}."))[1]

    def get(self, name: str) -> click.Command | None:
        """The command of that name; None if nobody knows it."""
        points = [point for point in self._points() if point.name == name]
        if not points and name not in self.expected:
            return None
        extra = self.expected.get(name, ("dev", ""))[0]
        return PassThrough(name, points[0] if points else None, extra, self.help(name))

    def _points(self) -> list[EntryPoint]:
        return list(entry_points(group=self.entry_point_group))


class PassThrough(click.Command):
    """Hands all its arguments, --help too, to another package's `main(argv) -> int`."""

    def __init__(self, name: str, point: EntryPoint | None, extra: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help, add_help_option=False)
        self._point = point
        self._extra = extra

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse nothing."""
        ctx.args = list(args)
        return []

    def invoke(self, ctx: click.Context) -> int:
        """Load and run; a missing package says how to install it."""
        if self._point is None:
            raise self._missing(ctx, "")
        with _own_arguments(ctx):
            try:
                return int(self._point.load()(ctx.args) or 0)
            except ModuleNotFoundError as error:
                raise self._missing(ctx, f" (no module named {error.name!r})") from error
            except SystemExit as stop:
                if stop.code is None or isinstance(stop.code, int):
                    return stop.code or 0
                raise click.ClickException(str(stop.code)) from None

    def _missing(self, ctx: click.Context, why: str) -> click.ClickException:
        return click.ClickException(
            f"{ctx.command_path} is not installed{why}: pip install 'octavo[{self._extra}]'"
        )


@contextlib.contextmanager
def _own_arguments(ctx: click.Context) -> Any:
    """Let the command see the sys.argv that it would have had on its own."""
    before = sys.argv
    sys.argv = [ctx.command_path, *ctx.args]
    try:
        yield
    finally:
        sys.argv = before


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one only to run it."""

    def __init__(
        self,
        *args: Any,
        own: Mapping[str, tuple[str, str]],
        services: ServiceCommands,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._own = own
        self._services = services

    def list_commands(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
    ) -> list[str]:
        """Own commands in their order, then the services'."""
        return [*self._own, *(name for name in self._services.names() if name not in self._own)]

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        cmd_name: str,
    ) -> click.Command | None:
        """Import one command."""
        if cmd_name not in self._own:
            return self._services.get(cmd_name)
        module, _, attribute = self._own[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any."""
        rows = [
            (name, self._own[name][1] if name in self._own else self._services.help(name))
            for name in self.list_commands(ctx)
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)
