"""Frames and memory use, shared with the sandboxed processes (`template_sandbox`, `grammar_sandbox`).

Untrusted processes import it, so it must import neither grpc nor anything of penstock.
"""

from __future__ import annotations

import resource
import struct
from typing import IO

NICENESS = 5  # of a sandbox, so that workers on the same cores are not slowed down
_LENGTH = struct.Struct(">I")


def write_frame(stream: IO[bytes], data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Returns the next frame; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return data if len(data) == length else None


def used_bytes() -> int:
    """Returns the bytes of address space in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
