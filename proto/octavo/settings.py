"""Settings of a process as flags and variables, with help for people; one line refuses.

Both services and the gateway use it, none of which may import another. It needs
pydantic-settings, which all three install and the SDK does not.
"""

from __future__ import annotations

from argparse import Action, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

_SHOWN_CHARACTERS = 100
_MAX_PORT = 65535

S = TypeVar("S", bound=BaseSettings)


def settings_config(env_prefix: str) -> SettingsConfigDict:
    """Give the configuration of a settings class whose fields are flags, too."""
    return SettingsConfigDict(
        env_prefix=env_prefix,
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )


@dataclass(frozen=True, slots=True)
class Flags(Generic[S]):
    """How one settings class looks on a command line.

    Attributes:
        prog: name of the command.
        settings: the class; its docstring and its fields' descriptions are the help.
        metavars: what help calls the value of a flag that is neither a switch nor a choice.
        defaults_in_words: by field, where the default itself says too little.
        example: the field by which help shows how a variable is called.
        error: makes what is raised, of one line.
    """

    prog: str
    settings: type[S]
    metavars: Mapping[str, str]
    defaults_in_words: Mapping[str, str]
    example: str
    error: Callable[[str], Exception]

    def read(self, args: Sequence[str]) -> S:
        """Read flags, then the environment, then defaults.

        Raises:
            Exception: `error`'s, in one line that names the flag and what it may be.
            SystemExit: with code 0, after printing help.
        """
        try:
            source = CliSettingsSource[Any](
                self.settings, root_parser=self._parser(), add_argument_method=self._add
            )(args=list(args))
            # a keyword that BaseSettings adds and mypy cannot see
            return self.settings(_cli_settings_source=source)  # type: ignore[call-arg]  # see above
        except ValidationError as error:
            raise self.error(self._explain(error.errors()[0])) from None
        except SettingsError as error:
            raise self.error(f"{str(error).splitlines()[0]}; see {self.prog} --help") from None

    def _parser(self) -> ArgumentParser:
        parser = _Parser(
            self.error,
            prog=self.prog,
            usage="%(prog)s [FLAG ...]",
            description=self.settings.__doc__,
            epilog=f"Each flag is also an environment variable: {flag_of(self.example)} is "
            f"{self._variable_of(self.example)}.",
            formatter_class=partial(RawDescriptionHelpFormatter, max_help_position=30),
            allow_abbrev=False,
            add_help=False,
        )
        parser._optionals.title = "flags"
        parser.add_argument("-h", "--help", action="help", help="Show this and exit.")
        return parser

    def _add(self, parser: ArgumentParser, *flags: str, dest: str, **options: Any) -> Action:
        """Add a setting's flag, with its value and default as a person would write them."""
        field = self.settings.model_fields[dest]
        default = self.defaults_in_words.get(dest) or _in_words(field.default)
        options["help"] = f"{field.description} (default: {default})".replace("%", "%%")
        if dest in self.metavars:
            options["metavar"] = self.metavars[dest]
        return parser.add_argument(*flags, dest=dest, **options)

    def _explain(self, error: ErrorDetails) -> str:
        """One line: the flag, its bound, and what came instead."""
        name = str(error["loc"][0]) if error["loc"] else ""
        if name not in self.settings.model_fields:
            return str(error["msg"]).removeprefix("Value error, ")
        bound = error["ctx"]["bound"] if error["type"] == "bound" else self._bound_of(name)
        got = str(error["input"])
        shown = repr(got if len(got) <= _SHOWN_CHARACTERS else got[:_SHOWN_CHARACTERS] + "…")
        variable = self._variable_of(name)
        return f"{flag_of(name)} must be {bound}, got {shown} (or set {variable})"

    def _bound_of(self, name: str) -> str:
        """What a field may be, read from its own declaration."""
        field = self.settings.model_fields[name]
        kind, constraints = _kind_of(field.annotation, list(field.metadata))
        if get_origin(kind) is Literal:
            return "one of " + ", ".join(get_args(kind))
        if kind is bool:
            return "true or false"
        limits = [limit for limit in map(_limit_of, constraints) if limit]
        if kind is int or kind is float:
            noun = "a whole number" if kind is int else "a number"
            return f"{noun}, {' and '.join(limits)}" if limits else noun
        return " and ".join(["not empty", *limits])

    def _variable_of(self, name: str) -> str:
        return f"{self.settings.model_config['env_prefix']}{name.upper()}"


def flag_of(name: str) -> str:
    """A field's flag."""
    return "--" + name.replace("_", "-")


def bad(bound: str) -> PydanticCustomError:
    """Give the error of a field that is not what `bound` says."""
    return PydanticCustomError("bound", "must be {bound}", {"bound": bound})


def split_list(value: object) -> object:
    """Split what commas separate, in one text or in several; anything else is left as it is."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple):
        parts = (part for item in value for part in str(item).split(","))
        return tuple(part.strip() for part in parts if part.strip())
    return value


def parse_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT; the host of an IPv6 address stands in brackets.

    Raises:  PydanticCustomError: a ValueError, if it is not of that form.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if not colon or not bare or (":" in bare) is not bracketed or not port.isascii():
        raise bad("HOST:PORT")
    if not port.isdigit() or int(port[:6]) > _MAX_PORT:
        raise bad(f"HOST:PORT with a port up to {_MAX_PORT}")
    return bare, int(port)


class _Parser(ArgumentParser):
    def __init__(self, make_error: Callable[[str], Exception], **options: Any) -> None:
        super().__init__(**options)
        self._make_error = make_error

    def error(self, message: str) -> NoReturn:
        raise self._make_error(f"{message}; see {self.prog} --help")


def _kind_of(annotation: Any, constraints: list[Any]) -> tuple[Any, list[Any]]:
    """The type itself and its constraints; of one that may be None, the other one's."""
    if isinstance(annotation, UnionType):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        constraints = constraints + [c for info in more for c in getattr(info, "metadata", [info])]
    return annotation, constraints


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
        case MaxLen():
            return f"at most {constraint.max_length} characters"
        case _:
            return ""
