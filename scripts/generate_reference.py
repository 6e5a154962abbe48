"""Write docs/reference.md from the comments of the protos and the scheduler's error table.

Usage: python -P scripts/generate_reference.py [OUTPUT]

The output (default: docs/reference.md) is committed; a test generates it afresh and fails
on any difference.
"""

from __future__ import annotations

import inspect
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb
from google.rpc import code_pb2
from grpc_tools import protoc

from scheduler_svc import errors
from scheduler_svc.api import status

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "proto"
# In the order in which a reader wants them.
FILES = ("inference", "types", "admin", "executor")
WIDTH = 100

INTRO = """\
# Reference

Generated from [proto/octavo/v1](../proto/octavo/v1) and the scheduler's error table by
`make reference`; change those, not this page.

A field that is not set has the value zero, "" or none; where that matters, the field is
*optional* and says what unset means. Fields *of* the same group exclude each other. Bounds are
checked by the service, which names the field and its bound in the error.
"""

ERRORS = """\
## Errors

Errors are gRPC statuses with `google.rpc` details, never in-band text. Every error of the
service's own has an `ErrorInfo` of domain `octavo`, whose reason is a constant for programs; one
without it comes from gRPC itself, such as a connection that broke. Clients may retry
`UNAVAILABLE` and `RESOURCE_EXHAUSTED`, the latter no sooner than its `RetryInfo` says, and bring
what they have received as `resume`.
"""


class Comments:
    """The comments of one file, by the path of what they describe."""

    def __init__(self, file: pb.FileDescriptorProto) -> None:
        """Take them from the file's source information."""
        self._by_path = {
            tuple(location.path): location.leading_comments
            for location in file.source_code_info.location
        }

    def lines(self, *path: int) -> list[str]:
        """Lines of a comment, without the blank that follows each //."""
        text = self._by_path.get(path, "")
        return [line.removeprefix(" ").rstrip() for line in text.splitlines()]

    def text(self, *path: int) -> str:
        """A comment in one line."""
        return " ".join(" ".join(self.lines(*path)).split())


def main(output: Path) -> None:
    """Write the reference."""
    output.write_text(render(), encoding="utf-8")


def render() -> str:
    """Return the whole page."""
    files = {Path(file.name).stem: file for file in read_files()}
    if sorted(files) != sorted(FILES):
        raise SystemExit(f"generate_reference: FILES must list {sorted(files)}")
    parts: list[str] = [INTRO, *render_contents(files.values()), ERRORS, *render_errors()]
    for name in FILES:
        parts += render_file(files[name])
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def read_files() -> Sequence[pb.FileDescriptorProto]:
    """Return the descriptors of all protos, with their comments.

    Raises:  SystemExit: if protoc refuses a file.
    """
    protos = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("octavo/v1/*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "descriptors"
        flags = [f"--proto_path={PROTOS}", "--include_source_info"]
        code = protoc.main(["protoc", *flags, f"--descriptor_set_out={target}", *protos])
        if code != 0:
            raise SystemExit(f"protoc failed with code {code}")
        return pb.FileDescriptorSet.FromString(target.read_bytes()).file


def render_contents(files: Iterable[pb.FileDescriptorProto]) -> Iterator[str]:
    """Yield the list of what a reader may look for."""
    ordered = sorted(files, key=lambda file: FILES.index(Path(file.name).stem))
    services = [service.name for file in ordered for service in file.service]
    lines = [f"* {link(name)}" for name in services]
    yield "\n".join([*lines, "* [Errors](#errors)"])


def render_errors() -> Iterator[str]:
    """Yield the table of errors, from what the scheduler really sends."""
    rows = []
    for kind, (code, reason) in status._TABLE.items():
        sent = status.from_error(sample(kind))
        details = [packed.type_url.rpartition(".")[2] for packed in sent.details]
        when = (inspect.getdoc(kind) or "").splitlines()[0]
        shown = ", ".join(f"`{detail}`" for detail in details)
        rows.append((f"`{code_pb2.Code.Name(code)}`", f"`{reason}`", shown, when))
    yield table(("status", "reason", "details", "when"), rows)


def sample(kind: type[errors.OctavoError]) -> errors.OctavoError:
    """Make an error of a kind, whatever its constructor wants."""
    if kind.__init__ is Exception.__init__:
        return kind("why")
    values = {"str": "x", "float": 1.0}
    _, *parameters = inspect.signature(kind.__init__).parameters.values()  # the first is self
    return kind(*(values.get(str(parameter.annotation), 1) for parameter in parameters))


def render_file(file: pb.FileDescriptorProto) -> Iterator[str]:
    """Yield the services, messages and enums of one file."""
    comments = Comments(file)
    yield f"## {file.name}"
    yield from prose(comments.lines(12))
    for number, service in enumerate(file.service):
        yield f"### {service.name}"
        yield from prose(comments.lines(6, number))
        rows = [
            (
                f"`{method.name}`",
                stream(method.input_type, method.client_streaming),
                stream(method.output_type, method.server_streaming),
                escape(comments.text(6, number, 2, index)),
            )
            for index, method in enumerate(service.method)
        ]
        yield table(("method", "request", "response", "what"), rows)
    for number, message in enumerate(file.message_type):
        yield from render_message(message, message.name, comments, (4, number))
    for number, enum in enumerate(file.enum_type):
        yield from render_enum(enum, enum.name, comments, (5, number))


def render_message(
    message: pb.DescriptorProto, name: str, comments: Comments, path: tuple[int, ...]
) -> Iterator[str]:
    """Yield a message's fields, then what is defined inside it."""
    yield f"### {name}"
    yield from prose(comments.lines(*path))
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    rows = []
    for index, field in enumerate(message.field):
        what, bounds = split_bounds(comments.text(*path, 2, index))
        shown = field_type(field, message, entries)
        rows.append((f"`{field.name}`", str(field.number), shown, escape(what), escape(bounds)))
    if rows:
        yield table(("field", "#", "type", "what", "bounds"), rows)
    for index, group in enumerate(message.oneof_decl):
        if not group.name.startswith("_"):  # those stand for optional fields
            yield f"*Of* {escape(comments.text(*path, 8, index))}"
    for index, enum in enumerate(message.enum_type):
        yield from render_enum(enum, f"{name}.{enum.name}", comments, (*path, 4, index))
    for index, nested in enumerate(message.nested_type):
        if nested.name not in entries:
            yield from render_message(nested, f"{name}.{nested.name}", comments, (*path, 3, index))


def render_enum(
    enum: pb.EnumDescriptorProto, name: str, comments: Comments, path: tuple[int, ...]
) -> Iterator[str]:
    """Yield an enum's values."""
    yield f"### {name}"
    yield from prose(comments.lines(*path))
    rows = [
        (f"`{value.name}`", str(value.number), escape(comments.text(*path, 2, index)))
        for index, value in enumerate(enum.value)
    ]
    yield table(("value", "#", "what"), rows)


def field_type(
    field: pb.FieldDescriptorProto,
    message: pb.DescriptorProto,
    entries: dict[str, pb.DescriptorProto],
) -> str:
    """Say what a field holds: its type, and how often it may be there."""
    entry = entries.get(field.type_name.rpartition(".")[2])
    if entry is not None:
        key, value = (type_name(part) for part in entry.field)
        return f"map from {key} to {value}"
    shown = type_name(field)
    if field.label == field.LABEL_REPEATED:
        return f"{shown}, repeated"
    if field.proto3_optional:
        return f"{shown}, optional"
    if field.HasField("oneof_index"):
        return f"{shown}, *of* {message.oneof_decl[field.oneof_index].name}"
    return shown


def type_name(field: pb.FieldDescriptorProto) -> str:
    """The name of a field's type; a message or an enum is a link."""
    if field.type_name:
        return link(short(field.type_name))
    return pb.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def stream(name: str, is_stream: bool) -> str:
    """A method's message, once or many times."""
    return f"stream of {link(short(name))}" if is_stream else link(short(name))


def short(full_name: str) -> str:
    """A name without its package."""
    return full_name.removeprefix(".octavo.v1.")


def link(name: str) -> str:
    """A link to the heading of a service, message or enum."""
    return f"[{name}](#{name.replace('.', '').lower()})"


def split_bounds(comment: str) -> tuple[str, str]:
    """Take the bounds out of a field's comment; what stands before and after them stays."""
    match = re.search(r"\s*\bBounds: (.*?)(?= Default: |$)", comment)
    if match is None:
        return comment, ""
    return comment[: match.start()] + comment[match.end() :], match[1].removesuffix(".")


def prose(lines: Iterable[str]) -> Iterator[str]:
    """Yield paragraphs; lines that are indented keep their form."""
    paragraph: list[str] = []
    block: list[str] = []

    def flush() -> Iterator[str]:
        if paragraph:
            yield textwrap.fill(escape(" ".join(paragraph)), WIDTH, break_long_words=False)
            paragraph.clear()
        if block:
            yield "\n".join(["```", *textwrap.dedent("\n".join(block)).splitlines(), "```"])
            block.clear()

    for line in lines:
        is_form = line.startswith("  ")
        if not line or (block if not is_form else paragraph):
            yield from flush()
        if line:
            (block if is_form else paragraph).append(line)
    yield from flush()


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; columns without any entry are left out."""
    rows = list(rows)
    kept = [at for at in range(len(head)) if any(row[at] for row in rows)]
    lines = [[head[at] for at in kept], ["---" for _ in kept]]
    lines += [[row[at] for at in kept] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape(text: str) -> str:
    """Text that Markdown shows as it is, in a table too."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference.md")
