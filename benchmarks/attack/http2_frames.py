"""Frames of HTTP/2, written by hand, because client libraries refuse to send an attack's frames. Pure.

https://www.rfc-editor.org/rfc/rfc9113, header blocks as literals without indexing (RFC 7541, section 6.2.2).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, ACK = 0x1, 0x4, 0x1
INITIAL_WINDOW_SIZE = 0x4  # a setting
CANCEL = 0x8  # an error code
_HEAD = struct.Struct(">IBI")  # length and type, flags, stream
HEAD_BYTES = 9
MAX_PAYLOAD = 16384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(len(payload) << 8 | kind, flags, stream) + payload


def settings(values: Iterable[tuple[int, int]] = ()) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", key, value) for key, value in values))


def header_block(headers: Iterable[tuple[str, str]]) -> bytes:
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in headers)


def _text(text: str) -> bytes:
    data = text.encode("latin-1")
    return _number(len(data)) + data


def _number(value: int) -> bytes:
    """Encodes an integer with a prefix of seven bits."""
    if value < 0x7F:
        return bytes([value])
    parts = [0x7F]
    value -= 0x7F
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def grpc_headers(path: str, authority: str, key: str = "", timeout: str = "") -> list[tuple[str, str]]:
    """Returns the headers of a gRPC call; `timeout` is such as 4S."""
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    if key:
        headers.append(("authorization", f"Bearer {key}"))
    if timeout:
        headers.append(("grpc-timeout", timeout))
    return headers


def open_call(stream: int, headers: Iterable[tuple[str, str]], message: bytes | None) -> bytes:
    """Returns the frames of a unary call; without a message, those of a call that never sends one."""
    head = frame(HEADERS, END_HEADERS, stream, header_block(headers))
    if message is None:
        return head
    return head + b"".join(data_frames(stream, b"\0" + struct.pack(">I", len(message)) + message))


def data_frames(stream: int, data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), MAX_PAYLOAD):
        last = start + MAX_PAYLOAD >= len(data)
        yield frame(DATA, END_STREAM if last else 0, stream, data[start : start + MAX_PAYLOAD])


def parse_head(head: bytes) -> tuple[int, int, int, int]:
    """Returns the payload's length, the kind, the flags and the stream of a frame's first nine bytes."""
    packed, flags, stream = _HEAD.unpack(head)
    return packed >> 8, packed & 0xFF, flags, stream & 0x7FFFFFFF
