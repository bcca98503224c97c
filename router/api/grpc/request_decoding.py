"""Decodes a client's message, or names the field at fault: gRPC itself would answer INTERNAL and name nothing.

A message of many fields is refused before protobuf makes an object of each, and no more fields are examined for an
explanation than a message may have. The library decodes on the event loop; it leaves large messages to the handler,
which has threads.
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

_TEXT = "text"  # the field of a prompt

# Wire types: https://protobuf.dev/programming-guides/encoding/
_VARINT, _FIXED64, _LENGTH_DELIMITED, _GROUP_START, _GROUP_END, _FIXED32 = range(6)
_MAX_VARINT_BYTES = 10
_UNCOUNTED_BYTES = 64 * 1024  # decoded in a few milliseconds, however many fields it has
_INLINE_BYTES = 8 * 1024  # decoded in a fraction of a millisecond
_MAX_EXPLAINED_FIELDS = 4096  # read in a few milliseconds
_CONTINUED = bytes(range(128, 256))  # the bytes of varints but the last of each


class _TooManyFields(Exception):
    pass


class _Delimited(NamedTuple):
    """A length-delimited field: text, bytes, a message or packed numbers."""

    number: int
    start: int
    end: int


class _FieldReader:
    """Reads the fields of one message of the wire format, and counts them against a budget."""

    def __init__(self, data: bytes, max_fields: int) -> None:
        self._data = data
        self._fields_left = max_fields

    def delimited(self, start: int, end: int) -> Iterator[_Delimited]:
        """Yields the length-delimited fields, except those within groups: no message of ours has one.

        Raises DecodeError for bytes that are not a message, _TooManyFields when the budget is spent.
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
        """Returns the number and where it ends."""
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
    """A large message, to be decoded off the event loop."""

    data: bytes
    decode: Callable[[bytes, int], Any]  # returns the message or what is wrong with it, given `tolerant`'s bound


def deserializer(kind: type[MessageT], limits: LimitsConfig) -> Callable[[bytes], MessageT | InvalidInput | Undecoded]:
    """Returns what decodes a message as `tolerant` does, but for large ones."""
    decode = tolerant(kind, limits)

    def read(data: bytes) -> MessageT | InvalidInput | Undecoded:
        return decode(data) if len(data) <= _INLINE_BYTES else Undecoded(data, decode)

    return read


def tolerant(kind: type[MessageT], limits: LimitsConfig) -> _Decode[MessageT]:
    """Returns a deserializer that returns the problem instead of raising it; the handler raises it as a status.

    Its second argument is how many bytes the prompt's text may have at most; longer ones are not even decoded.
    """
    descriptor: Descriptor = kind.DESCRIPTOR  # type: ignore[assignment]
    # A message of text has three fields, one with a tool call seven, and one that answers it four; a bias or a tool has
    # up to four.
    max_fields = 5 * limits.messages + 4 * (limits.logit_bias + limits.tools) + 1024
    # Of the prompt, emitted by an earlier call, and of the sampling parameters.
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
            return error.with_traceback(None)  # whose frames hold the message

    return read


class _CountCheck:
    """Counts the fields of one message, numbers in packed fields, and bytes of the text.

    A class and no nested function: one that calls itself holds itself, and the message with it, until a garbage
    collection.
    """

    def __init__(self, data: bytes, max_fields: int, max_numbers: int, max_text_bytes: int) -> None:
        self._data = data
        self._reader = _FieldReader(data, max_fields)
        self._max_numbers = max_numbers
        self._max_text_bytes = max_text_bytes
        self._num_numbers = 0

    def check(self, kind: Descriptor, start: int, end: int, path: str = "") -> None:
        """Raises InvalidInput, DecodeError or _TooManyFields."""
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
    """Names the first string field that is not UTF-8, else reports that the message cannot be read.

    Beyond `_MAX_EXPLAINED_FIELDS` it does not look for such a field.
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
