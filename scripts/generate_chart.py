"""Write what the Helm chart has from elsewhere: schema, README, dashboard and rules.

Usage: python -P scripts/generate_chart.py [FOLDER]

From helm/octavo/values.yaml, the services' settings and deploy/ come values.schema.json,
README.md and files/ in FOLDER (default: helm/octavo). All are committed; a test generates
them afresh and fails on any difference.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from octavo_gateway.config import GatewayConfig
from pydantic_settings import BaseSettings

from executor_svc.config import ExecutorConfig
from scheduler_svc.config import SchedulerConfig

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "octavo"
COPIES = {
    "files/dashboard.json": ROOT / "deploy" / "grafana" / "octavo.json",
    "files/rules.yml": ROOT / "deploy" / "prometheus" / "rules.yml",
}

SERVICES: dict[str, type[BaseSettings]] = {
    "scheduler": SchedulerConfig,
    "executor": ExecutorConfig,
    "gateway": GatewayConfig,
}
# What the chart sets by itself, from other values.
_BOTH_SET = "model model_store listen insecure_bind tls_cert tls_key tls_client_ca metrics_listen"
_SCHEDULER_SETS = (
    "api_keys api_keys_inline executors executor_ca executor_cert executor_key "
    "executor_server_name scheduler_id grace_seconds"
)
_GATEWAY_SETS = (
    "listen insecure_bind target insecure_target ca_file cert_file key_file server_name "
    "tls_cert tls_key grace_seconds"
)
# What the chart sets by itself from other values, or leaves alone (the scheduler's id).
CHART_SETS: dict[str, frozenset[str]] = {
    "scheduler": frozenset([*_BOTH_SET.split(), *_SCHEDULER_SETS.split()]),
    "executor": frozenset([*_BOTH_SET.split(), "device", "tensor_parallel_size", "grace_seconds"]),
    "gateway": frozenset(_GATEWAY_SETS.split()),
}
_TYPES = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength", "maxLength")

INTRO = """\
# octavo: a Helm chart

Installs a scheduler, executors and the OpenAI gateway of [Octavo](../../README.md) with one
command. [docs/deploy.md](../../docs/deploy.md) is the guide: sizing, security, scaling, upgrades,
and what is not there yet. This page lists every value.

```console
$ helm install octavo ./helm/octavo --values helm/octavo/ci/cpu-demo-values.yaml    # no GPU
$ helm test octavo
```

[ci/](ci) has values to start from: `cpu-demo`, `single-gpu`, `eight-gpu-node`, `eight-gpu-tp`,
`production`.
`values.schema.json` refuses values that do not exist or are out of bounds, naming them.

This page and the schema are generated from `values.yaml` and the services' settings by
`make chart`; change those, not this page.
"""


@dataclass(slots=True)
class Value:
    """One value of values.yaml, or a group of them.

    Attributes:
        path: keys from the root.
        default: as YAML has it.
        doc: the comment above it, in one paragraph.
        schema: what an @schema comment says; None without one.
        service: whose settings it holds; "" for any other value.
        children: of a group.
    """

    path: tuple[str, ...]
    default: Any
    doc: str = ""
    schema: dict[str, Any] | None = None
    service: str = ""
    children: list[Value] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its keys with dots between."""
        return ".".join(self.path)

    def leaves(self) -> Iterator[Value]:
        """Yield the values below that are no groups."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()


def read_values(path: Path = CHART / "values.yaml") -> Value:
    """Read values.yaml with its comments.

    Raises:  ValueError: if a map or list has neither content nor an @schema or @config comment.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    root = Value((), yaml.safe_load(text))
    root.children = list(_children(root, yaml.compose(text), lines))
    return root


def _children(parent: Value, node: yaml.Node, lines: list[str]) -> Iterator[Value]:
    for key, content in node.value:
        value = Value((*parent.path, key.value), parent.default[key.value])
        _read_comment(value, lines, key.start_mark.line)
        is_leaf = value.schema is not None or value.service or not isinstance(value.default, dict)
        if not is_leaf:
            value.children = list(_children(value, content, lines))
            is_leaf = not value.children
        if is_leaf and value.default in (None, {}, []) and not (value.schema or value.service):
            raise ValueError(f"{value.name}: an @schema comment must say what it may hold")
        yield value


def _read_comment(value: Value, lines: list[str], line: int) -> None:
    words: list[str] = []
    first = line
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    for text in lines[first:line]:
        comment = text.strip().removeprefix("#").strip()
        if comment.startswith("@schema"):
            value.schema = yaml.safe_load(comment.removeprefix("@schema"))
        elif comment.startswith("@config"):
            value.service = comment.split()[1]
        else:
            words.append(comment)
    value.doc = " ".join(words)


# -- schema ----------------------------------------------------------------------------


def camel(name: str) -> str:
    """A setting's name as the chart has it: max_queue, maxQueue."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def settings_of(service: str) -> dict[str, dict[str, Any]]:
    """The settings of a service that a user of the chart may give, each with its schema."""
    properties = SERVICES[service].model_json_schema()["properties"]
    return {
        camel(name): _setting(schema)
        for name, schema in properties.items()
        if name not in CHART_SETS[service]
    }


def _setting(schema: dict[str, Any]) -> dict[str, Any]:
    """A setting as JSON Schema of draft 7 has it; null is the same as leaving it out."""
    for choice in schema.get("anyOf", ()):
        if choice != {"type": "null"}:
            schema = {**choice, **{k: v for k, v in schema.items() if k != "anyOf"}}
    kept = {k: v for k, v in schema.items() if k in {"type", "enum", "items", *_BOUNDS}}
    return {"description": schema["description"], **kept}


def json_schema(root: Value) -> dict[str, Any]:
    """The whole of values.schema.json."""
    schema = _schema(root)
    # Helm hands a parent chart's global values to its children.
    schema["properties"]["global"] = {"type": "object"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "octavo", **schema}


def _schema(value: Value) -> dict[str, Any]:
    described = {"description": value.doc} if value.doc else {}
    if value.service:
        inner: dict[str, Any] = {"properties": settings_of(value.service)}
    elif value.children:
        inner = {"properties": {child.path[-1]: _schema(child) for child in value.children}}
    else:
        inner = dict(value.schema or {})
    if "enum" in inner and "type" not in inner:
        return {**described, **inner}
    kind = inner.pop("type", None) or _TYPES[type(value.default)]
    if kind == "object":
        inner.setdefault("additionalProperties", False)
    return {**described, "type": kind, **inner}


# -- README ----------------------------------------------------------------------------


def readme(root: Value) -> str:
    """The whole of README.md."""
    parts = [INTRO]
    for group in root.children:
        if group.children:
            parts += [f"## {group.name}\n", *([group.doc + "\n"] if group.doc else [])]
            parts.append(_table(group.leaves()))
            parts += list(_config_tables(group))
    general = [value for value in root.children if not value.children]
    parts[1:1] = ["## General\n", _table(general)]
    return "\n".join(parts)


def _table(values: Iterable[Value]) -> str:
    lines = ["| value | default | what |", "| --- | --- | --- |"]
    for value in values:
        default = json.dumps(value.default, ensure_ascii=False)
        what = value.doc
        if value.service:
            what = f"{what} [Below](#settings-of-the-{value.service}) is what it may hold."
        bounds = _in_words(_schema(value))
        cells = (f"`{value.name}`", f"`{default}`", f"{what} {bounds}".strip())
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _config_tables(group: Value) -> Iterator[str]:
    for value in group.leaves():
        if not value.service:
            continue
        yield f"### Settings of the {value.service}\n"
        yield (
            f"Keys of `{value.name}`; what is left out has the service's own default, which "
            f"`octavo {value.service} --help` tells.\n"
        )
        lines = ["| key | flag | what |", "| --- | --- | --- |"]
        for name, schema in settings_of(value.service).items():
            flag = "--" + re.sub(r"[A-Z]", lambda match: "-" + match[0].lower(), name)
            what = f"{schema['description']} {_in_words(schema)}".strip()
            lines.append(f"| `{name}` | `{flag}` | {what} |")
        yield "\n".join(lines) + "\n"


def _in_words(schema: dict[str, Any]) -> str:
    """The bounds of a number, or what a word may be; "" for others."""
    if "enum" in schema:
        return f"One of {', '.join(f'`{each}`' for each in schema['enum'])}."
    words = []
    if "minimum" in schema:
        words.append(f"at least {schema['minimum']:g}")
    if "exclusiveMinimum" in schema:
        words.append(f"above {schema['exclusiveMinimum']:g}")
    if "maximum" in schema:
        words.append(f"at most {schema['maximum']:.12g}")
    if "exclusiveMaximum" in schema:
        words.append(f"below {schema['exclusiveMaximum']:g}")
    text = ", ".join(words)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def main(folder: Path) -> None:
    """Write everything."""
    root = read_values()
    schema = json.dumps(json_schema(root), indent=2, ensure_ascii=False) + "\n"
    written = {"values.schema.json": schema, "README.md": readme(root)}
    written |= {name: source.read_text(encoding="utf-8") for name, source in COPIES.items()}
    for name, text in written.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHART)
