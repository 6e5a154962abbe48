"""Settings as flags: their help, for people, and one line about a wrong one."""

from __future__ import annotations

from argparse import Action, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NoReturn, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings

from scheduler_svc.errors import StartupError

_SHOWN_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class FlagHelp:
    """How one settings class looks on a command line.

    Attributes:
        prog: name of the command.
        settings: the class; its docstring and its fields' descriptions are the help.
        env_prefix: of the fields' environment variables.
        metavars: what help calls the value of a flag that is neither a switch nor a choice.
        defaults_in_words: by field, where the default itself says too little.
    """

    prog: str
    settings: type[BaseSettings]
    env_prefix: str
    metavars: Mapping[str, str]
    defaults_in_words: Mapping[str, str]

    def parser(self) -> ArgumentParser:
        """Give an empty parser; settings add their flags to it by `add`."""
        parser = _Parser(
            prog=self.prog,
            usage="%(prog)s [FLAG ...]",
            description=self.settings.__doc__,
            epilog="Each flag is also an environment variable: "
            f"--max-queue is {self.env_prefix}MAX_QUEUE.",
            formatter_class=partial(RawDescriptionHelpFormatter, max_help_position=30),
            allow_abbrev=False,
            add_help=False,
        )
        parser._optionals.title = "flags"
        parser.add_argument("-h", "--help", action="help", help="Show this and exit.")
        return parser

    def add(self, parser: ArgumentParser, *flags: str, dest: str, **options: Any) -> Action:
        """Add a setting's flag, with its value and default as a person would write them."""
        field = self.settings.model_fields[dest]
        default = self.defaults_in_words.get(dest) or _in_words(field.default)
        options["help"] = f"{field.description} (default: {default})".replace("%", "%%")
        if dest in self.metavars:
            options["metavar"] = self.metavars[dest]
        return parser.add_argument(*flags, dest=dest, **options)

    def explain(self, error: ErrorDetails) -> str:
        """One line: the flag, its bound, and what came instead."""
        name = str(error["loc"][0]) if error["loc"] else ""
        if name not in self.settings.model_fields:
            return str(error["msg"])
        flag = "--" + name.replace("_", "-")
        bound = error["ctx"]["bound"] if error["type"] == "bound" else self._bound_of(name)
        got = str(error["input"])
        shown = repr(got if len(got) <= _SHOWN_CHARACTERS else got[:_SHOWN_CHARACTERS] + "…")
        return f"{flag} must be {bound}, got {shown} (or set {self.env_prefix}{name.upper()})"

    def _bound_of(self, name: str) -> str:
        """What a field may be, read from its own declaration."""
        field = self.settings.model_fields[name]
        kind: Any = field.annotation
        if get_origin(kind) is Literal:
            return "one of " + ", ".join(get_args(kind))
        if kind is bool:
            return "true or false"
        if kind is int or kind is float:
            noun = "a whole number" if kind is int else "a number"
            limits = [_limit_of(constraint) for constraint in field.metadata]
            return f"{noun}, {' and '.join(limit for limit in limits if limit)}"
        return "not empty and at most 128 characters" if name == "scheduler_id" else "not empty"


def bad(bound: str) -> PydanticCustomError:
    """Give the error of a field that is not what `bound` says."""
    return PydanticCustomError("bound", "{bound}", {"bound": bound})


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message}; see {self.prog} --help")


def _in_words(default: object) -> str:
    match default:
        case bool():
            return "on" if default else "off"
        case float():
            return f"{default:g}"
        case tuple():
            return ",".join(default)
        case _:
            return str(default)


def _limit_of(constraint: object) -> str:
    match constraint:
        case Ge():
            return f"at least {constraint.ge}"
        case Gt():
            return f"above {constraint.gt}"
        case Le():
            return f"at most {constraint.le}"
        case Lt():
            return f"below {constraint.lt}"
        case _:
            return ""
