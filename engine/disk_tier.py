"""Pages that were evicted from host memory, kept in one file of a configured folder.

The file has no name (it is unlinked as soon as it is open) and is readable by its owner alone: it holds prompts in
another form, so nothing of it may outlive the process. Its size is reserved at the start. What is read back must have
the checksum of what was written, kept in memory: a page that a disk has spoiled is a miss, never KV.

Reads and writes block the step loop, mostly for as long as the operating system's page cache takes. A write that fails
ends the tier's growth, not the worker: what is there can still be read.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import xxhash

from engine.page_slots import PageSlots
from penstock.errors import ConfigError
from penstock.types import PageHash

log = logging.getLogger(__name__)


class DiskTier:
    """Owns the file and its slots."""

    def __init__(self, folder: str | Path, num_pages: int, page_bytes: int) -> None:
        """Raises ConfigError for a folder that cannot hold the file."""
        self._page_bytes = page_bytes
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix="penstock-kv-", buffering=0)  # noqa: SIM115
            os.posix_fallocate(self._file.fileno(), 0, num_pages * page_bytes)
        except OSError as error:
            raise ConfigError(
                f"engine.disk_path = {str(folder)!r} cannot hold {num_pages * page_bytes} bytes ({error.strerror}); "
                "give a folder with room, or a smaller engine.disk_bytes"
            ) from error
        self.slots = PageSlots(num_pages)
        self._checksums = [0] * num_pages  # of what stands in each slot
        self._broken = False
        self.num_spoiled = 0  # pages that did not read back as they were written

    def store(self, page_hash: PageHash, content: memoryview) -> list[PageHash]:
        """Keeps a page that is not here yet; returns the pages that are here no more, or that never came to be."""
        if self._broken:
            return [page_hash]
        slot, left = self.slots.add(page_hash)
        try:
            self._write(slot, content)
        except OSError as error:
            log.error("the disk tier takes no more pages: %s", error)
            self._broken = True
            self.slots.discard(page_hash)
            return [page_hash] if left is None else [page_hash, left]
        self._checksums[slot] = xxhash.xxh3_64_intdigest(content)
        return [] if left is None else [left]

    def load(self, page_hash: PageHash, buffer: memoryview) -> bool:
        """Reads a page that is here; False where it does not read back as it was written, and it is forgotten."""
        slot = self.slots.slot(page_hash)
        try:
            num_read = os.preadv(self._file.fileno(), [buffer], slot * self._page_bytes)
        except OSError as error:
            log.error("a page cannot be read from the disk tier: %s", error)
            num_read = 0
        if num_read == self._page_bytes and xxhash.xxh3_64_intdigest(buffer) == self._checksums[slot]:
            return True
        self.num_spoiled += 1
        log.error("a page of the disk tier is spoiled: %d bytes read, %d so far", num_read, self.num_spoiled)
        self.slots.discard(page_hash)
        return False

    def clear(self) -> list[PageHash]:
        """Every page leaves, and so does its content; returns the pages."""
        os.ftruncate(self._file.fileno(), 0)
        return self.slots.clear()

    def _write(self, slot: int, content: memoryview) -> None:
        num_written = os.pwrite(self._file.fileno(), content, slot * self._page_bytes)
        if num_written != self._page_bytes:
            raise OSError(f"{num_written} of {self._page_bytes} bytes written")

    def close(self) -> None:
        self._file.close()
