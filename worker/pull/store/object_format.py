"""Names objects of the shared store, writes them and checks them. Pure.

An object is a run of consecutive pages, named by the hash of its last page, which depends on every token before it, the
weights and the tenant. Its folder is named by the layout of the pages, the format's version and the deployment's key:
other layouts, revisions and deployments never meet. An object begins with a header in msgpack and ends with the pages.

With a cluster secret the header's tag is a MAC of everything (HMAC-SHA256, 1.7 GB/s with SHA instructions): someone who
can write into the store but lacks the secret cannot add anything that a worker would use. Without a secret the tag only
shows damage.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgpack
import xxhash

from penstock.errors import PenstockError
from penstock.types import PageHash

FORMAT_VERSION = 1
ROOT_FOLDER = f"v{FORMAT_VERSION}"
MAX_RUN_PAGES = 16
_MAX_RUN_BYTES = 8 << 20  # of the pages of one object: the most that a read can waste, and that each takes in memory
_MAGIC = b"PENSTOCK"
_PREFIX = struct.Struct("<8sI32s")  # magic, bytes of the header, tag
_MAX_HEADER_BYTES = 2048


class UnusableObject(PenstockError):
    """Says that an object of the shared store is damaged, or not of this deployment."""


@dataclass(frozen=True, slots=True)
class RunFormat:
    """The form of a worker's objects, which belong to one layout and one deployment."""

    layout: str  # digest of the layout
    page_bytes: int
    page_tokens: int
    key: bytes = b""  # derived from the cluster secret; empty without one

    @property
    def run_pages(self) -> int:
        """The pages of one object. It depends on the layout alone, so that all workers divide prompts alike."""
        return max(1, min(MAX_RUN_PAGES, _MAX_RUN_BYTES // self.page_bytes))

    @property
    def run_bytes(self) -> int:
        return self.run_pages * self.page_bytes

    @property
    def max_object_bytes(self) -> int:
        return _PREFIX.size + _MAX_HEADER_BYTES + self.run_bytes

    @property
    def folder(self) -> str:
        identity = f"{FORMAT_VERSION}/{self.layout}/{self.page_bytes}/{self.page_tokens}/{self.run_pages}"
        digest = blake2b(identity.encode(), digest_size=16, key=self.key, person=b"penstock-store").hexdigest()
        return f"{ROOT_FOLDER}/{digest}"

    def name(self, page_hash: PageHash) -> str:
        """Returns the name of the object whose last page this is."""
        text = page_hash.hex()
        return f"{self.folder}/{text[:2]}/{text}"

    def pack(self, hashes: Sequence[PageHash], pages: memoryview) -> bytes:
        """Returns the beginning of an object, before these pages. Reads the pages twice."""
        header = msgpack.packb(
            {
                "layout": self.layout,
                "tokens": len(hashes) * self.page_tokens,
                "hashes": list(hashes),
                "xxh3": xxhash.xxh3_128_digest(pages),
            }
        )
        return _PREFIX.pack(_MAGIC, len(header), self._tag(header, pages)) + header

    def unpack(self, content: memoryview, hashes: Sequence[PageHash]) -> memoryview:
        """Returns the pages of an object. Raises UnusableObject unless it holds exactly those with these hashes."""
        if len(content) < _PREFIX.size:
            raise UnusableObject(f"is cut off after {len(content)} bytes")
        magic, header_bytes, tag = _PREFIX.unpack_from(content)
        if magic != _MAGIC or header_bytes > _MAX_HEADER_BYTES:
            raise UnusableObject("does not begin like an object of this store")
        start = _PREFIX.size + header_bytes
        header, pages = bytes(content[_PREFIX.size : start]), content[start:]
        if len(pages) != self.run_bytes:
            raise UnusableObject(f"holds {len(pages)} bytes of pages, not {self.run_bytes}")
        if not hmac.compare_digest(tag, self._tag(header, pages)):
            raise UnusableObject("does not match its tag: it is damaged, or a stranger has written it")
        self._check(header, pages, hashes)
        return pages

    def _check(self, header: bytes, pages: memoryview, hashes: Sequence[PageHash]) -> None:
        try:
            fields = msgpack.unpackb(header)
            is_right = (
                fields["layout"] == self.layout
                and fields["tokens"] == len(hashes) * self.page_tokens
                and fields["hashes"] == list(hashes)
                and fields["xxh3"] == xxhash.xxh3_128_digest(pages)
            )
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            raise UnusableObject(f"has a header that cannot be read: {error!r}") from error
        if not is_right:
            raise UnusableObject("holds other pages than its name says")

    def _tag(self, header: bytes, pages: memoryview) -> bytes:
        if not self.key:
            return hashlib.sha256(header).digest()
        mac = hmac.new(self.key, header, "sha256")
        mac.update(pages)
        return mac.digest()
