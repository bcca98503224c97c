"""Reads the header of a GGUF file: its metadata, and the places of its tensors. Torch-free.

A header states counts and lengths before the items themselves, so each is checked against the file's size and a limit
before it is used. Arrays are skipped: they hold the vocabulary, which is taken from tokenizer.json. (Only the block
formats of the `gguf` package are used: its reader makes a Python object of every value, however many a file claims.)

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from penstock.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 16  # of metadata, and of tensors; the largest published files have a few thousand
_MAX_STRING_BYTES = 1 << 20  # chat templates are the longest
_MAX_TEXTS = 1 << 22  # strings of one array: a vocabulary has a few hundred thousand
_MAX_DIMS = 4
_ALIGNMENT = 32
_SCALARS = {
    GGUFValueType.UINT8: "<B", GGUFValueType.INT8: "<b", GGUFValueType.UINT16: "<H", GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I", GGUFValueType.INT32: "<i", GGUFValueType.FLOAT32: "<f", GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q", GGUFValueType.INT64: "<q", GGUFValueType.FLOAT64: "<d",
}  # fmt: skip
# The `gguf` package decodes these, and tests compare its decoders with another one.
SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")

Value = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    kind: str  # ggml's name of how values are stored
    shape: tuple[int, ...]  # as torch counts dimensions: rows first
    offset: int  # of its first byte in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    file: Path
    metadata: Mapping[str, Value]  # without arrays
    tensors: Mapping[str, GgufTensor]


def read_header(file: Path) -> GgufHeader:
    """Reads a header. Raises CheckpointError, which names the file and the fix."""
    try:
        with file.open("rb") as stream:
            return _HeaderReader(file, stream).read()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}; give a GGUF file") from error


class _HeaderReader:
    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file, self._stream = file, stream
        self._size = file.stat().st_size

    def read(self) -> GgufHeader:
        if self._take(4) != _MAGIC:
            raise CheckpointError(f"{self._file} is not a GGUF file; give one, or a Hugging Face checkpoint folder")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self._file}: GGUF version {version} is not supported (big-endian files are read as such a version); "
                f"give a little-endian file of version {' or '.join(map(str, _VERSIONS))}"
            )
        num_tensors, num_values = self._count("tensors", _MAX_ENTRIES), self._count("metadata", _MAX_ENTRIES)
        metadata: dict[str, Value] = {}
        for _ in range(num_values):
            key = self._text("a key of the metadata")
            value = self._value(key, self._number("<I"))
            if value is not None:
                metadata[key] = value
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        return GgufHeader(self._file, metadata, self._place(entries, metadata))

    def _value(self, key: str, kind: int) -> Value | None:
        """Reads a value; None for an array."""
        if kind == GGUFValueType.STRING:
            return self._text(key)
        if kind == GGUFValueType.ARRAY:
            self._skip_array(key)
            return None
        value: Value = self._number(self._format_of(key, kind))
        return value

    def _format_of(self, key: str, kind: int) -> str:
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._file}: {key} has the unknown type {kind}; fetch the file again")
        return _SCALARS[GGUFValueType(kind)]

    def _skip_array(self, key: str) -> None:
        kind = self._number("<I")
        if kind != GGUFValueType.STRING:
            size = struct.calcsize(self._format_of(key, kind))
            self._skip(self._count(key, self._size // size) * size)
            return
        for _ in range(self._count(key, _MAX_TEXTS)):
            self._skip(self._number("<Q"))

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("the name of a tensor")
        num_dims = self._number("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise CheckpointError(f"{self._file}: tensor {name} has {num_dims} dimensions; fetch the file again")
        dims = [self._number("<Q") for _ in range(num_dims)]
        return name, tuple(reversed(dims)), self._number("<I"), self._number("<Q")

    def _place(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], metadata: Mapping[str, Value]
    ) -> dict[str, GgufTensor]:
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self._file}: general.alignment = {alignment!r}; fetch the file again")
        start = -(-self._stream.tell() // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            known, num_bytes = self._bytes_of(name, shape, kind)
            if start + offset + num_bytes > self._size:
                raise self._cut_short(f"tensor {name} ends at byte {start + offset + num_bytes}")
            if name in tensors:
                raise CheckpointError(f"{self._file}: tensor {name} appears twice; fetch the file again")
            tensors[name] = GgufTensor(name, known, shape, start + offset, num_bytes)
        if sum(tensor.num_bytes for tensor in tensors.values()) > self._size:
            raise CheckpointError(f"{self._file}: its tensors overlap; fetch the file again")
        return tensors

    def _bytes_of(self, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            known = None
        if known is None or known.name not in SUPPORTED_TYPES:
            stored = f"type {kind}" if known is None else known.name
            raise CheckpointError(
                f"{self._file}: tensor {name} is stored as {stored}; give a file of {', '.join(SUPPORTED_TYPES)}, such "
                "as Q4_K_M or Q8_0"
            )
        block, block_bytes = GGML_QUANT_SIZES[known]
        if shape[-1] % block:
            raise CheckpointError(f"{self._file}: rows of {name} have no whole blocks of {block}; fetch the file again")
        return known.name, math.prod(shape) // block * block_bytes

    # Bytes.

    def _text(self, what: str) -> str:
        length = self._count(what, _MAX_STRING_BYTES)
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self._file}: {what} is not UTF-8; fetch the file again") from error

    def _count(self, what: str, most: int) -> int:
        count = self._number("<Q")
        if count > most:
            raise CheckpointError(f"{self._file} claims a size of {count} for {what}; at most {most} is read")
        return int(count)

    def _number(self, fmt: str) -> int:
        (number,) = struct.unpack(fmt, self._take(struct.calcsize(fmt)))
        return number  # type: ignore[no-any-return]

    def _take(self, count: int) -> bytes:
        data = self._stream.read(count)
        if len(data) < count:
            raise self._cut_short(f"its header goes on after byte {self._stream.tell()}")
        return data

    def _skip(self, count: int) -> None:
        if self._stream.tell() + count > self._size:
            raise self._cut_short(f"its header goes on after byte {self._stream.tell()}")
        self._stream.seek(count, 1)

    def _cut_short(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._file} is cut short: {why}, and it has {self._size}; fetch the file again")
