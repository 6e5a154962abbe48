"""Recipes of peers: TOML files that say how one is started, and where it then answers.

    kind = "server"                   # or "script": runs the workload itself
    command = ["{bin}", "serve", "{model}", "--dtype={dtype}", "--port={port}"]
    url = "http://127.0.0.1:{port}/v1"        # servers; grpc:// is Octavo's own API
    ready = "/health"                 # servers by http: a GET of it answers 200. [/v1/models]
    ready_seconds = 300               # servers: how long they may take. [180]
    run_seconds = 3600                # scripts: how long they may take. [3600]
    env = { OMP_NUM_THREADS = "2" }
    notes = "shown in the report"

    [values]                          # what {names} stand for; --set NAME=VALUE changes them
    bin = "vllm"
    model = "~/models/m"
    dtype = "bfloat16"
    cache = { bfloat16 = "bf16", float32 = "f32" }      # chosen by the value of dtype

Built in: {port} is a free port, {python} this interpreter, {here} the recipe's folder, and
for scripts {requests} the workload's file. A script prints what `octavo bench --json`
writes (of it: "requests", and what it will of "server" and "process") on stdout.
"""

from __future__ import annotations

import string
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo_client.errors import OctavoError

BUILT_IN = ("port", "python", "here", "requests")
_KINDS = ("server", "script")
_MOST_SECONDS = 86_400.0


class RecipeError(OctavoError):
    """A recipe cannot be used; the message says which file, which field, and its bound."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a peer is started; see the module. Strings hold {names} that are not yet filled.

    Attributes:
        path: the file that it was read from.
        values: what the names stand for, after --set and the choice by dtype.
    """

    path: Path
    kind: str
    command: tuple[str, ...]
    url: str = ""
    ready: str = "/v1/models"
    ready_seconds: float = 180.0
    run_seconds: float = 3600.0
    model: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    notes: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    def fill(self, text: str, built_in: Mapping[str, str]) -> str:
        """Replace each {name}; a leading ~ of a value is the home folder."""
        values = {name: _expand(value) for name, value in self.values.items()}
        return text.format_map({**built_in, **values})


def _expand(value: str) -> str:
    return str(Path(value).expanduser()) if value.startswith("~") else value


def read_recipe(path: Path, settings: Mapping[str, str] | None = None) -> Recipe:
    """Read a recipe, with these values instead of its own where it has such names.

    Raises:
        RecipeError: naming the file, the field and what it must be.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: not valid TOML: {error}") from error
    fields = _Fields(path, table)
    recipe = Recipe(
        path=path,
        kind=fields.choice("kind", _KINDS, default="server"),
        command=fields.words("command"),
        url=fields.text("url"),
        ready=fields.text("ready", default="/v1/models"),
        ready_seconds=fields.seconds("ready_seconds", default=180.0),
        run_seconds=fields.seconds("run_seconds", default=3600.0),
        model=fields.text("model") or None,
        env=fields.texts("env"),
        notes=fields.text("notes"),
        values=fields.values(settings or {}),
    )
    fields.refuse_unknown()
    _check(recipe)
    return recipe


def _check(recipe: Recipe) -> None:
    """Refuse what no single field shows."""

    def fail(name: str, bound: str) -> RecipeError:
        return RecipeError(f"{recipe.path}: field {name!r} {bound}")

    if recipe.kind == "server" and not recipe.url.startswith(("http://", "https://", "grpc://")):
        raise fail("url", f"must begin with http://, https:// or grpc://, got {recipe.url!r}")
    if recipe.kind == "script" and recipe.url:
        raise fail("url", "is for kind 'server' only")
    if not recipe.ready.startswith("/"):
        raise fail("ready", f"must be a path that begins with /, got {recipe.ready!r}")
    known = {*BUILT_IN, *recipe.values}
    texts = [("command", word) for word in recipe.command]
    texts += [("url", recipe.url), *(("env", value) for value in recipe.env.values())]
    for name, text in texts:
        try:
            used = {found for _, found, _, _ in string.Formatter().parse(text) if found is not None}
        except ValueError as error:
            raise fail(name, f"has a stray brace in {text!r}: {error}") from None
        for missing in sorted(used - known):
            raise fail(name, f"uses {{{missing}}}, which is not under [values]")


class _Fields:
    """Takes typed fields out of a table, and knows which were never taken."""

    def __init__(self, path: Path, table: dict[str, Any]) -> None:
        self._path = path
        self._rest = dict(table)

    def _fail(self, name: str, bound: str, got: object) -> RecipeError:
        return RecipeError(f"{self._path}: field {name!r} must be {bound}, got {got!r}")

    def text(self, name: str, *, default: str = "") -> str:
        value = self._rest.pop(name, default)
        if not isinstance(value, str):
            raise self._fail(name, "a string", value)
        return value

    def choice(self, name: str, choices: tuple[str, ...], *, default: str) -> str:
        value = self.text(name, default=default)
        if value not in choices:
            raise self._fail(name, f"one of {', '.join(choices)}", value)
        return value

    def words(self, name: str) -> tuple[str, ...]:
        value = self._rest.pop(name, None)
        if not isinstance(value, list) or not value or not all(isinstance(w, str) for w in value):
            raise self._fail(name, "a list of strings, not empty", value)
        return tuple(value)

    def seconds(self, name: str, *, default: float) -> float:
        value = self._rest.pop(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= _MOST_SECONDS:
            raise self._fail(name, f"seconds above 0, at most {_MOST_SECONDS:g}", value)
        return float(value)

    def texts(self, name: str) -> dict[str, str]:
        value = self._rest.pop(name, {})
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise self._fail(name, "a table of strings", value)
        return value

    def values(self, settings: Mapping[str, str]) -> dict[str, str]:
        """[values] with the settings over them; a table is resolved by dtype."""
        table = self._rest.pop("values", {})
        if not isinstance(table, dict):
            raise self._fail("values", "a table", table)
        for name in BUILT_IN:
            if name in table and name != "python":
                raise RecipeError(f"{self._path}: field 'values.{name}' is built in")
        merged = {**table, **{n: v for n, v in settings.items() if n in table or n == "python"}}
        dtype = merged.get("dtype")
        return {name: self._resolve(name, value, dtype) for name, value in merged.items()}

    def _resolve(self, name: str, value: object, dtype: object) -> str:
        if isinstance(value, dict):
            if dtype not in value:
                known = ", ".join(value)
                raise self._fail(f"values.{name}", f"used with a dtype of {known}", dtype)
            value = value[dtype]
        if not isinstance(value, str):
            raise self._fail(f"values.{name}", "a string, or a table by dtype of strings", value)
        return value

    def refuse_unknown(self) -> None:
        """Fail on what was never taken: a misspelt field would be lost silently."""
        for name in self._rest:
            raise RecipeError(f"{self._path}: field {name!r} is unknown")
