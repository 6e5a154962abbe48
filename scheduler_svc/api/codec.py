"""Request bytes to messages, so that bad bytes are the client's error and not ours.

grpc answers INTERNAL when a deserializer raises. So these deserializers never raise:
bytes that are no message become a `Malformed`, which the servicer turns into
INVALID_ARGUMENT. To name the field, the wire format is walked with the descriptor.

A request larger than max_request_bytes never gets here: the transport refuses it with
RESOURCE_EXHAUSTED and no details.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from scheduler_svc.errors import InvalidArgument

_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_MAX_DEPTH = 32
_MAX_FIELDS = 10_000  # past these the fault is reported without its field
_MAX_VARINT_BYTES = 10
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Malformed:
    """What stands in for a message that could not be parsed."""

    error: InvalidArgument


def deserializer(kind: type[M]) -> Callable[[bytes], M | Malformed]:
    """Make a deserializer for one message type that never raises."""

    def parse(data: bytes) -> M | Malformed:
        try:
            return kind.FromString(data)
        except DecodeError:
            return Malformed(explain(data, cast(Descriptor, kind.DESCRIPTOR)))

    return parse


def register(
    server: grpc.aio.Server,
    service: ServiceDescriptor,
    methods: Mapping[str, Callable[..., Any]],
) -> None:
    """Add a service whose methods take a message or a `Malformed`.

    Args:
        server: not started yet.
        service: its descriptor; every method takes one request.
        methods: by name, coroutines of (message, context).
    """
    handlers = {}
    for method in service.methods:
        request = message_factory.GetMessageClass(method.input_type)
        response = message_factory.GetMessageClass(method.output_type)
        make = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        handlers[method.name] = make(
            methods[method.name],
            request_deserializer=deserializer(request),
            response_serializer=response.SerializeToString,
        )
    generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))


def explain(data: bytes, descriptor: Descriptor) -> InvalidArgument:
    """Say what is wrong with bytes that did not parse as a message."""
    fault = _Walk(_MAX_FIELDS).find(data, descriptor, "", 0)
    return fault or InvalidArgument("request", "a well-formed protobuf message")


class _Truncated(Exception):
    """The bytes end, or make no sense, at an offset."""

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset


class _Walk:
    """One walk over the wire format, bounded in depth and in fields."""

    def __init__(self, max_fields: int) -> None:
        self._fields_left = max_fields

    def find(
        self, data: bytes, descriptor: Descriptor, path: str, depth: int
    ) -> InvalidArgument | None:
        """Give the first fault in a message, or None if none was found within bounds."""
        counts: dict[int, int] = {}
        offset = 0
        while offset < len(data):
            self._fields_left -= 1
            if self._fields_left < 0:
                return None
            try:
                number, wire_type, value, offset = _read_field(data, offset)
            except _Truncated as fault:
                got = f"bytes that make no sense at offset {fault.offset}"
                return InvalidArgument(path or "request", "a well-formed protobuf message", got)
            field = descriptor.fields_by_number.get(number)
            if field is None or wire_type != _LENGTH:
                continue
            index = counts[number] = counts.get(number, -1) + 1
            fault_below = self._check(value, field, _join(path, field, index), depth)
            if fault_below is not None:
                return fault_below
        return None

    def _check(
        self, value: bytes, field: FieldDescriptor, path: str, depth: int
    ) -> InvalidArgument | None:
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                value.decode()
            except UnicodeDecodeError as error:
                return InvalidArgument(path, "valid UTF-8", f"a bad byte at offset {error.start}")
        elif field.message_type is not None and depth < _MAX_DEPTH:
            return self.find(value, field.message_type, path, depth + 1)
        return None


def _join(path: str, field: FieldDescriptor, index: int) -> str:
    name = f"{path}.{field.name}" if path else field.name
    return f"{name}[{index}]" if field.is_repeated else name


def _read_field(data: bytes, offset: int) -> tuple[int, int, bytes, int]:
    """Read one field: number, wire type, payload where it has a length, next offset.

    Groups do not exist in proto3, but unknown fields may be groups: their tags are passed
    over and their fields read as unknown ones.
    """
    start = offset
    tag, offset = _read_varint(data, offset)
    number, wire_type = tag >> 3, tag & 7
    value = b""
    if wire_type == _VARINT:
        _, offset = _read_varint(data, offset)
    elif wire_type == _LENGTH:
        length, offset = _read_varint(data, offset)
        value = data[offset : offset + length]
        offset += length
    elif wire_type in (_FIXED64, _FIXED32):
        offset += 8 if wire_type == _FIXED64 else 4
    elif wire_type not in (_START_GROUP, _END_GROUP):
        raise _Truncated(start)
    if offset > len(data) or number == 0:
        raise _Truncated(start)
    return number, wire_type, value, offset


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for position in range(_MAX_VARINT_BYTES):
        if offset + position >= len(data):
            break
        byte = data[offset + position]
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value, offset + position + 1
    raise _Truncated(offset)
