"""Reads a client's message, or says what is wrong with it: gRPC itself would answer INTERNAL and name nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from penstock.errors import InvalidInput

MessageT = TypeVar("MessageT", bound=Message)

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def tolerant(kind: type[MessageT]) -> Callable[[bytes], MessageT | InvalidInput]:
    """A deserializer that returns the problem instead of raising it; the handler then raises it as a status."""

    def read(data: bytes) -> MessageT | InvalidInput:
        try:
            return kind.FromString(data)
        except DecodeError:
            return explain(data, kind.DESCRIPTOR)  # type: ignore[arg-type]

    return read


def explain(data: bytes, descriptor: Descriptor) -> InvalidInput:
    """Names the first string field that is not UTF-8, else says that the message cannot be read."""
    try:
        found = _find_broken_string(data, descriptor, "")
    except (IndexError, ValueError, DecodeError):
        found = None
    if found is None:
        return InvalidInput("request", f"is no {descriptor.full_name}; encode it with this version's proto files")
    field, problem = found
    return InvalidInput(field, f"is not valid UTF-8 ({problem}); send text as UTF-8")


def _find_broken_string(data: bytes, descriptor: Descriptor, path: str) -> tuple[str, str] | None:
    counts: dict[int, int] = {}
    for number, value in _length_delimited(data):
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        rank = counts[number] = counts.get(number, -1) + 1
        name = f"{path}{field.name}[{rank}]" if field.is_repeated else f"{path}{field.name}"
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                value.decode()
            except UnicodeDecodeError as error:
                return name, str(error.reason) + f" at byte {error.start}"
        elif field.message_type is not None:
            found = _find_broken_string(value, field.message_type, f"{name}.")
            if found is not None:
                return found
    return None


def _length_delimited(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Field number and bytes of each length-delimited field."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, position = _varint(data, position)
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        elif kind == _LENGTH:
            length, position = _varint(data, position)
            yield number, data[position : position + length]
            position += length
        else:
            raise ValueError(f"wire type {kind}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
