"""The scheduler's settings: one frozen object, the only reader of the environment.

A flag wins over its environment variable, which wins over the default. The variable of
--max-queue is OCTAVO_SCHEDULER_MAX_QUEUE, and so on.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from argparse import Action, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    NoDecode,
    SettingsConfigDict,
    SettingsError,
)

from scheduler_svc.errors import StartupError

ENV_PREFIX = "OCTAVO_SCHEDULER_"
DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_MODEL_STORE = "~/.cache/octavo/models"
_PROG = "octavo scheduler"
_MAX_PORT = 65535
# What --help calls the value of a flag that is neither a switch nor a choice.
_METAVARS = {
    "model": "NAME",
    "model_store": "FOLDER",
    "listen": "HOST:PORT",
    "executors": "HOST:PORT,...",
    "scheduler_id": "NAME",
    "max_num_batched_tokens": "TOKENS",
    "max_num_seqs": "N",
    "max_queue": "N",
    "max_model_len": "TOKENS",
    "watermark": "FRACTION",
    "max_steps_in_flight": "N",
    "step_timeout_seconds": "SECONDS",
    "claim_timeout_seconds": "SECONDS",
    "grace_seconds": "SECONDS",
    "reader_timeout_seconds": "SECONDS",
    "tokenizer_threads": "N",
    "max_request_bytes": "BYTES",
}
_DEFAULTS_IN_WORDS = {
    "model_store": f"OCTAVO_MODEL_STORE if set, else {DEFAULT_MODEL_STORE}",
    "scheduler_id": "made of host, process and a random part",
    "max_model_len": "0, the model's own",
    "max_request_bytes": "4194304, 4 MiB",
}


def _default_model_store() -> Path:
    return Path(os.environ.get("OCTAVO_MODEL_STORE") or DEFAULT_MODEL_STORE)


def _default_scheduler_id() -> str:
    """Host and process, and a part that a restarted container does not repeat."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


class SchedulerConfig(BaseSettings):
    """Serve the public API and own the KV blocks of the executors; needs no GPU."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="Model to serve: a name in the model store, a folder, or a hub id. Only its "
        "configuration and tokenizer are read.",
    )
    model_store: Path = Field(
        default_factory=_default_model_store,
        description="Folder with one folder per model.",
    )
    listen: str = Field(
        "127.0.0.1:50051",
        description="HOST:PORT of the public API; port 0 takes a free one.",
    )
    insecure_bind: bool = Field(
        False,
        description="Allow --listen on an address that other machines reach: the port is neither "
        "encrypted nor authenticated.",
    )
    executors: Annotated[tuple[str, ...], NoDecode] = Field(
        ("127.0.0.1:50061",),
        description="HOST:PORT of each executor, separated by commas.",
    )
    scheduler_id: str = Field(
        default_factory=_default_scheduler_id,
        min_length=1,
        max_length=128,
        description="Name under which executors know this process, unique among schedulers.",
    )
    max_num_batched_tokens: int = Field(
        8192,
        ge=1,
        description="Tokens that one step may compute; an executor's own limit is lower as a rule.",
    )
    max_num_seqs: int = Field(128, ge=1, description="Sequences that may run in one step.")
    max_queue: int = Field(
        1024, ge=1, description="Requests that may wait; more are refused with a retry delay."
    )
    max_model_len: int = Field(0, ge=0, description="Longest context in tokens, prompt and output.")
    watermark: float = Field(
        0.01,
        ge=0.0,
        lt=1.0,
        description="Fraction of the KV blocks held back at admission so that running sequences "
        "can grow.",
    )
    max_steps_in_flight: int = Field(
        2, ge=1, le=4, description="Steps planned ahead of their results."
    )
    preemption: Literal["auto", "recompute", "swap"] = Field(
        "auto",
        description="How blocks are taken back: compute again later, move to host memory, or "
        "whichever is cheaper for the victim.",
    )
    policy: Literal["fcfs", "priority", "fair"] = Field(
        "priority",
        description="Order of waiting requests: by arrival, by priority then arrival, or fair "
        "between tenants within a priority.",
    )
    prefix_cache: bool = Field(
        True, description="Keep the K/V of finished prompts and reuse them for equal prefixes."
    )
    step_timeout_seconds: float = Field(
        60.0,
        gt=0.0,
        le=3600.0,
        description="Seconds a step may take before its executor counts as hung.",
    )
    claim_timeout_seconds: float = Field(
        10.0,
        gt=0.0,
        le=600.0,
        description="Seconds an executor may take to answer a claim.",
    )
    grace_seconds: float = Field(
        30.0,
        ge=0.0,
        le=3600.0,
        description="Seconds that running requests get to finish after SIGTERM.",
    )
    reader_timeout_seconds: float = Field(
        300.0,
        gt=0.0,
        le=86400.0,
        description="Seconds that a client may take nothing of its stream before it is given up.",
    )
    tokenizer_threads: int = Field(2, ge=1, le=64, description="Threads that tokenize prompts.")
    max_request_bytes: int = Field(
        4 * 1024 * 1024,
        ge=1024,
        le=1024 * 1024 * 1024,
        description="Bytes of one request; a larger one is refused by the transport itself with "
        "RESOURCE_EXHAUSTED.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe event that is logged."
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto",
        description="Of the log on stderr: for people, or one JSON object per line. auto: console "
        "on a terminal, else json.",
    )

    @field_validator("model_store")
    @classmethod
    def _expand_home(cls, value: Path) -> Path:
        return value.expanduser()

    @field_validator("executors", mode="before")
    @classmethod
    def _split_list(cls, value: object) -> object:
        if isinstance(value, str):
            value = value.split(",")
        if isinstance(value, list | tuple):
            parts = (part for item in value for part in str(item).split(","))
            return tuple(part.strip() for part in parts if part.strip())
        return value

    @field_validator("executors")
    @classmethod
    def _check_executors(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise _bad("at least one HOST:PORT")
        for address in value:
            if parse_address(address)[1] == 0:
                raise _bad("a list of HOST:PORT with ports from 1 to 65535")
        if len(set(value)) != len(value):
            raise _bad("a list without repetitions")
        return value

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: str) -> str:
        parse_address(value)
        return value

    @model_validator(mode="after")
    def _ask_for_open_bind(self) -> SchedulerConfig:
        host, _ = parse_address(self.listen)
        if not self.insecure_bind and not is_loopback(host):
            raise StartupError(
                f"--listen must be a loopback address, got {self.listen}; give --insecure-bind "
                "to listen where other machines can reach an unencrypted port"
            )
        return self

    @classmethod
    def from_args(cls, args: Sequence[str]) -> SchedulerConfig:
        """Read flags, then the environment, then defaults.

        Raises:
            StartupError: one line naming the flag and what it may be.
            SystemExit: with code 0, after printing help.
        """
        try:
            source = CliSettingsSource[Any](
                cls, root_parser=_parser(), add_argument_method=_add_flag
            )(args=list(args))
            # a keyword that BaseSettings adds and mypy cannot see
            return cls(_cli_settings_source=source)  # type: ignore[call-arg]
        except ValidationError as error:
            raise StartupError(_explain(error.errors()[0])) from None
        except SettingsError as error:
            raise StartupError(f"{str(error).splitlines()[0]}; see {_PROG} --help") from None


def _parser() -> ArgumentParser:
    """Give an empty parser whose help is for people; settings add their flags to it."""
    parser = _Parser(
        prog=_PROG,
        usage="%(prog)s [FLAG ...]",
        description=SchedulerConfig.__doc__,
        epilog=f"Each flag is also an environment variable: --max-queue is {ENV_PREFIX}MAX_QUEUE.",
        formatter_class=partial(RawDescriptionHelpFormatter, max_help_position=30),
        allow_abbrev=False,
        add_help=False,
    )
    parser._optionals.title = "flags"
    parser.add_argument("-h", "--help", action="help", help="Show this and exit.")
    return parser


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StartupError(f"{message}; see {_PROG} --help")


def _add_flag(parser: ArgumentParser, *flags: str, dest: str, **options: Any) -> Action:
    """Add a setting's flag, with its value and default as a person would write them."""
    field = SchedulerConfig.model_fields[dest]
    default = _DEFAULTS_IN_WORDS.get(dest) or _in_words(field.default)
    options["help"] = f"{field.description} (default: {default})".replace("%", "%%")
    if dest in _METAVARS:
        options["metavar"] = _METAVARS[dest]
    return parser.add_argument(*flags, dest=dest, **options)


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


def parse_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT; the host of an IPv6 address stands in brackets.

    Raises:  PydanticCustomError: a ValueError, if it is not of that form.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if not colon or not bare or (":" in bare) is not bracketed or not port.isascii():
        raise _bad("HOST:PORT")
    if not port.isdigit() or int(port) > _MAX_PORT:
        raise _bad(f"HOST:PORT with a port up to {_MAX_PORT}")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bad(bound: str) -> PydanticCustomError:
    return PydanticCustomError("bound", "{bound}", {"bound": bound})


def _explain(error: ErrorDetails) -> str:
    """One line: the flag, its bound, and what came instead."""
    name = str(error["loc"][0]) if error["loc"] else ""
    if name not in SchedulerConfig.model_fields:
        return str(error["msg"])
    flag = "--" + name.replace("_", "-")
    bound = error["ctx"]["bound"] if error["type"] == "bound" else _bound_of(name)
    got = str(error["input"])
    shown = repr(got if len(got) <= 100 else got[:100] + "…")
    return f"{flag} must be {bound}, got {shown} (or set {ENV_PREFIX}{name.upper()})"


def _bound_of(name: str) -> str:
    """What a field may be, read from its own declaration."""
    field = SchedulerConfig.model_fields[name]
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
