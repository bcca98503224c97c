"""Describes a broadcast of weights: where its members meet, and which tensors follow.

Pure and torch-free. The manifest is the first thing that a trainer sends, as JSON. Its own digest reaches the workers
through the deployment's authenticated calls, so that nobody else on the network can give them other weights.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.v1 import worker_pb2

TIMEOUT_S = 60.0
WITHIN_S = 1800.0

MAX_MANIFEST_BYTES = 64 << 20
_MAX_TENSORS = 500_000
_MAX_NAME = 512  # characters
_MAX_DIMENSIONS = 8
_MAX_TOTAL_BYTES = 1 << 46
_DIGEST_CHARACTERS = 64  # of SHA-256 in hexadecimal
_KEY_CHARACTERS = 32
_HEX = frozenset("0123456789abcdef")
_METADATA = "__metadata__"  # the entry of a safetensors header that is not a tensor
_ALIGNMENT = 8  # of the data in a safetensors file

# Bytes of one element, by safetensors' names.
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}


@dataclass(frozen=True, slots=True)
class WeightsBroadcast:
    """A broadcast, as a worker must know it to take part."""

    address: str  # host:port of the trainer's store, at which the members meet
    key: str  # names this broadcast in the store
    manifest_bytes: int
    manifest_digest: str  # SHA-256
    timeout_s: float  # for which any member waits for the next message of another
    within_s: float  # limit of the whole broadcast

    @classmethod
    def from_wire(cls, message: worker_pb2.WeightsBroadcast) -> WeightsBroadcast:
        """Raises InvalidInput unless every field is usable."""
        timeout_s, within_s = message.timeout_s or TIMEOUT_S, message.within_s or WITHIN_S
        broadcast = cls(
            message.address, message.key, message.manifest_bytes, message.manifest_digest, timeout_s, within_s
        )
        broadcast.check()
        return broadcast

    def check(self) -> None:
        """Raises InvalidInput unless every field is usable."""
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise InvalidInput("broadcast.address", f"is {self.address!r}; give host:port of the trainer's store")
        if len(self.key) != _KEY_CHARACTERS or not _HEX.issuperset(self.key):
            raise InvalidInput("broadcast.key", f"has to be {_KEY_CHARACTERS} random hexadecimal digits")
        if not 0 < self.manifest_bytes <= MAX_MANIFEST_BYTES:
            raise InvalidInput("broadcast.manifest_bytes", f"is {self.manifest_bytes}; give 1 to {MAX_MANIFEST_BYTES}")
        if not _is_digest(self.manifest_digest):
            raise InvalidInput("broadcast.manifest_digest", "has to be a SHA-256 in hexadecimal")
        for name in ("timeout_s", "within_s"):
            if not (0 < getattr(self, name) < math.inf):
                raise InvalidInput(f"broadcast.{name}", f"is {getattr(self, name)}; give seconds, more than 0")


@dataclass(frozen=True, slots=True)
class BroadcastMember:
    """A worker's part in a broadcast."""

    rank: int  # 1 or more; the trainer is 0
    num_ranks: int
    save_to: str = ""  # the folder that this member writes; "" if another one does


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a broadcast."""

    name: str
    dtype: str  # a key of `ITEM_BYTES`
    shape: tuple[int, ...]
    digest: str  # SHA-256 of its bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """The tensors of a broadcast, in the order in which they are sent."""

    tensors: tuple[TensorEntry, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(each.num_bytes for each in self.tensors)

    def encode(self) -> bytes:
        """Returns the manifest as JSON. Raises InvalidInput for what `parse` would refuse."""
        rows = [[each.name, each.dtype, list(each.shape), each.digest] for each in self.tensors]
        data = json.dumps(rows, separators=(",", ":")).encode()
        WeightsManifest.parse(data)
        return data

    @classmethod
    def parse(cls, data: bytes) -> WeightsManifest:
        """Raises InvalidInput unless `data` is the JSON of a manifest within all limits."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidInput("manifest", f"has {len(data)} bytes; at most {MAX_MANIFEST_BYTES} are accepted")
        try:
            rows = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InvalidInput("manifest", f"is not JSON: {error}; use the trainer's helper of this release") from error
        if not isinstance(rows, list) or not 0 < len(rows) <= _MAX_TENSORS:
            raise InvalidInput("manifest", f"has to be a list of 1 to {_MAX_TENSORS} tensors")
        manifest = cls(tuple(map(_parse_row, rows)))
        if len({each.name for each in manifest.tensors}) != len(rows):
            raise InvalidInput("manifest", "names a tensor twice")
        if manifest.num_bytes > _MAX_TOTAL_BYTES:
            raise InvalidInput("manifest", f"lists {manifest.num_bytes} bytes; at most {_MAX_TOTAL_BYTES} are accepted")
        return manifest

    def file_header(self) -> bytes:
        """Returns what a safetensors file of these tensors has in front of their bytes."""
        header: dict[str, object] = {_METADATA: {"format": "pt"}}
        offset = 0
        for each in self.tensors:
            end = offset + each.num_bytes
            header[each.name] = {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


def digest_of_bytes(data: bytes | memoryview) -> str:
    return sha256(data).hexdigest()


def _parse_row(row: object) -> TensorEntry:
    if not isinstance(row, list) or len(row) != 4:
        raise InvalidInput("manifest", "has an entry that is not [name, dtype, shape, digest]")
    name, dtype, shape, digest = row
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or name == _METADATA:
        raise InvalidInput("manifest", f"has the name {str(name)[:_MAX_NAME]!r}; give 1 to {_MAX_NAME} characters")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise InvalidInput("manifest", f"{name} is {str(dtype)[:20]!r}; send {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise InvalidInput("manifest", f"{name} has no usable shape; give at most {_MAX_DIMENSIONS} sizes above 0")
    if not _is_digest(digest):
        raise InvalidInput("manifest", f"{name} has no SHA-256 in hexadecimal")
    return TensorEntry(name, dtype, tuple(shape), digest)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= _MAX_TOTAL_BYTES


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == _DIGEST_CHARACTERS and _HEX.issuperset(value)
