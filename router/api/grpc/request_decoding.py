"""Decodes a client's message or names the invalid field. gRPC itself would answer INTERNAL without naming a field.

A message with too many fields is refused before protobuf creates an object for each of them. The search for an invalid
field is bounded too. Small messages are decoded on the event loop by the deserializer; the handler decodes large ones
on a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput
from router.api.limits import check_count

MessageT = TypeVar("MessageT", bound=Message)
DecodedT = TypeVar("DecodedT", bound=Message, covariant=True)

_TEXT = "text"  # name of the field that holds a prompt's text

# Wire types: https://protobuf.dev/programming-guides/encoding/
_VARINT, _FIXED64, _LENGTH_DELIMITED, _GROUP_START, _GROUP_END, _FIXED32 = range(6)
_MAX_VARINT_BYTES = 10
_UNCOUNTED_BYTES = 64 * 1024  # messages up to this size decode in a few milliseconds, whatever their fields
_INLINE_BYTES = 8 * 1024  # messages up to this size decode in a fraction of a millisecond
_MAX_EXPLAINED_FIELDS = 4096  # fields that are searched in a few milliseconds
_CONTINUED = bytes(range(128, 256))  # all bytes of a varint but the last are in this range


class _TooManyFields(Exception):
    pass


class _Delimited(NamedTuple):
    """A length-delimited field: text, bytes, a message or packed numbers."""

    number: int
    start: int
    end: int


class _FieldReader:
    """Reads the fields of one message in wire format and counts them against a budget."""

    def __init__(self, data: bytes, max_fields: int) -> None:
        self._data = data
        self._fields_left = max_fields

    def delimited(self, start: int, end: int) -> Iterator[_Delimited]:
        """Yields the length-delimited fields, except those in groups, which our messages do not use.

        Raises DecodeError if the bytes are not a message, and _TooManyFields when the budget is used up.
        """
        at, depth = start, 0
        while at < end:
            if self._fields_left == 0:
                raise _TooManyFields
            self._fields_left -= 1
            tag, at = self._varint(at, end)
            kind = tag & 7
            if kind == _VARINT:
                _, at = self._varint(at, end)
            elif kind == _LENGTH_DELIMITED:
                length, at = self._varint(at, end)
                if at + length > end:
                    raise DecodeError("a field ends after its message")
                if depth == 0:
                    yield _Delimited(tag >> 3, at, at + length)
                at += length
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            elif kind in (_GROUP_START, _GROUP_END):
                depth += 1 if kind == _GROUP_START else -1
            else:
                raise DecodeError(f"there is no wire type {kind}")

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """Returns the number and the position after it."""
        if at < end and self._data[at] < 0x80:
            return self._data[at], at + 1
        value = 0
        for rank, byte in enumerate(self._data[at : min(at + _MAX_VARINT_BYTES, end)]):
            value |= (byte & 0x7F) << 7 * rank
            if byte < 0x80:
                return value, at + rank + 1
        raise DecodeError("a number does not end")


class _Decode(Protocol[DecodedT]):
    def __call__(self, data: bytes, max_text_bytes: int = ..., /) -> DecodedT | InvalidInput: ...


class Undecoded(NamedTuple):
    """A large message that the handler must decode off the event loop."""

    data: bytes
    decode: Callable[[bytes, int], Any]  # the deserializer that `tolerant` returned


def deserializer(kind: type[MessageT], limits: LimitsConfig) -> Callable[[bytes], MessageT | InvalidInput | Undecoded]:
    """Returns a deserializer that decodes small messages as `tolerant` does and returns large ones as `Undecoded`."""
    decode = tolerant(kind, limits)

    def read(data: bytes) -> MessageT | InvalidInput | Undecoded:
        return decode(data) if len(data) <= _INLINE_BYTES else Undecoded(data, decode)

    return read


def tolerant(kind: type[MessageT], limits: LimitsConfig) -> _Decode[MessageT]:
    """Returns a deserializer that returns an InvalidInput instead of raising it, so that the handler can raise it.

    Its second argument is the maximum size of the prompt's text in bytes; a message with a longer one is not decoded.
    """
    descriptor: Descriptor = kind.DESCRIPTOR  # type: ignore[assignment]
    # A chat message of text has three fields, one with a tool call seven, and the answer to a tool call four; a logit
    # bias or a tool has up to four.
    max_fields = 5 * limits.messages + 4 * (limits.logit_bias + limits.tools) + 1024
    # The token ids of the prompt, of tokens emitted by an earlier call, and of the sampling parameters.
    max_numbers = 2 * limits.prompt_tokens + limits.stop_token_ids + limits.allowed_token_ids

    def read(data: bytes, max_text_bytes: int = limits.request_bytes) -> MessageT | InvalidInput:
        try:
            if len(data) > _UNCOUNTED_BYTES:
                _CountCheck(data, max_fields, max_numbers, max_text_bytes).check(descriptor, 0, len(data))
            return kind.FromString(data)
        except DecodeError:
            return explain(data, descriptor)
        except _TooManyFields:
            return InvalidInput(
                "request", f"has more than {max_fields} fields; send fewer messages, and pack repeated numbers"
            )
        except InvalidInput as error:
            return error.with_traceback(None)  # the traceback's frames would keep the message alive

    return read


class _CountCheck:
    """Counts the fields of one message, the numbers in its packed fields, and the bytes of its text.

    A recursive nested function would keep itself and the message alive until a garbage collection, hence the class.
    """

    def __init__(self, data: bytes, max_fields: int, max_numbers: int, max_text_bytes: int) -> None:
        self._data = data
        self._reader = _FieldReader(data, max_fields)
        self._max_numbers = max_numbers
        self._max_text_bytes = max_text_bytes
        self._num_numbers = 0

    def check(self, kind: Descriptor, start: int, end: int, path: str = "") -> None:
        """Checks the message of this kind in data[start:end]. Raises InvalidInput, DecodeError or _TooManyFields."""
        for number, begin, finish in self._reader.delimited(start, end):
            field = kind.fields_by_number.get(number)
            if field is None:
                continue
            if not path and field.name == _TEXT:
                check_count(_TEXT, finish - begin, self._max_text_bytes, "bytes")
            elif field.message_type is not None:
                self.check(field.message_type, begin, finish, f"{path}{field.name}.")
            elif field.is_repeated and field.type != FieldDescriptor.TYPE_STRING:
                self._num_numbers += len(self._data[begin:finish].translate(None, _CONTINUED))
                check_count(f"{path}{field.name}", self._num_numbers, self._max_numbers, "tokens")


def explain(data: bytes, descriptor: Descriptor) -> InvalidInput:
    """Returns an error that names the first string field that is not UTF-8, or else says that the message is invalid.

    It searches only the first `_MAX_EXPLAINED_FIELDS` fields.
    """
    try:
        found = _find_broken_string(_FieldReader(data, _MAX_EXPLAINED_FIELDS), data, descriptor)
    except (DecodeError, _TooManyFields):
        found = None
    if found is None:
        return InvalidInput("request", f"is not a {descriptor.full_name}; encode it with this version's proto files")
    field, problem = found
    return InvalidInput(field, f"is not valid UTF-8 ({problem}); send text as UTF-8")


def _find_broken_string(
    reader: _FieldReader, data: bytes, descriptor: Descriptor, path: str = "", start: int = 0, end: int | None = None
) -> tuple[str, str] | None:
    counts: dict[int, int] = {}
    for number, begin, finish in reader.delimited(start, len(data) if end is None else end):
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        rank = counts[number] = counts.get(number, -1) + 1
        name = f"{path}{field.name}[{rank}]" if field.is_repeated else f"{path}{field.name}"
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                data[begin:finish].decode()
            except UnicodeDecodeError as error:
                return name, f"{error.reason} at byte {error.start}"
        elif field.message_type is not None:
            found = _find_broken_string(reader, data, field.message_type, f"{name}.", begin, finish)
            if found is not None:
                return found
    return None
