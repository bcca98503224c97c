"""Pages that were evicted from host memory, kept in one file of a configured folder.

The file has no name (it is unlinked as soon as it is open) and is readable by its owner alone: it holds prompts in
another form, so nothing of it may outlive the process. Its size is reserved at the start. What is read back must have
the checksum of what was written, kept in memory: a page that a disk has spoiled is a miss, never KV.

`DiskFile` has the bytes: of one rank's pages, by slots, in a file of its own. `DiskTier` decides which page stands
where, for all ranks at once (`engine/ranked_pages.py`).

Reads and writes block the step loop, mostly for as long as the operating system's page cache takes. A write that fails
ends the tier's growth, not the worker: what is there can still be read.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Protocol

import xxhash

from engine.page_slots import PageSlots
from penstock.errors import ConfigError
from penstock.types import PageHash

log = logging.getLogger(__name__)


class HostContent(Protocol):
    """`engine.host_tier.HostTier`: where pages come from, and the buffer by way of which they go back."""

    bounce: memoryview

    def settle(self) -> None: ...

    def content(self, slot: int) -> memoryview: ...


class SlotFile(Protocol):
    """`DiskFile`, or one of each rank's."""

    def write(self, slot: int, host_slot: int) -> None: ...

    def read(self, slot: int) -> bool: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class DiskFile:
    """Owns the file, and knows the checksum of what stands in each slot."""

    def __init__(self, folder: str | Path, num_pages: int, host: HostContent) -> None:
        """Raises ConfigError for a folder that cannot hold the file."""
        self._host = host
        self._page_bytes = len(host.bounce)
        try:
            self.file = tempfile.TemporaryFile(dir=folder, prefix="penstock-kv-", buffering=0)  # noqa: SIM115
            os.posix_fallocate(self.file.fileno(), 0, num_pages * self._page_bytes)
        except OSError as error:
            raise ConfigError(
                f"engine.disk_path = {str(folder)!r} cannot hold {num_pages * self._page_bytes} bytes "
                f"({error.strerror}); give a folder with room, or a smaller engine.disk_bytes"
            ) from error
        self._checksums = [0] * num_pages

    def write(self, slot: int, host_slot: int) -> None:
        """Copies what is in that slot of host memory. Raises OSError."""
        self._host.settle()
        content = self._host.content(host_slot)
        num_written = os.pwrite(self.file.fileno(), content, slot * self._page_bytes)
        if num_written != self._page_bytes:
            raise OSError(f"{num_written} of {self._page_bytes} bytes written")
        self._checksums[slot] = xxhash.xxh3_64_intdigest(content)

    def read(self, slot: int) -> bool:
        """Into the host's bounce buffer; False where it does not read back as it was written."""
        buffer = self._host.bounce
        try:
            num_read = os.preadv(self.file.fileno(), [buffer], slot * self._page_bytes)
        except OSError as error:
            log.error("a page cannot be read from the disk tier: %s", error)
            return False
        return num_read == self._page_bytes and xxhash.xxh3_64_intdigest(buffer) == self._checksums[slot]

    def clear(self) -> None:
        """Erases everything."""
        os.ftruncate(self.file.fileno(), 0)

    def close(self) -> None:
        self.file.close()


class DiskTier:
    """Owns the slots."""

    def __init__(self, file: SlotFile, num_pages: int) -> None:
        self._file = file
        self.slots = PageSlots(num_pages)
        self._broken = False
        self.num_spoiled = 0  # pages that did not read back as they were written

    def store(self, page_hash: PageHash, host_slot: int) -> list[PageHash]:
        """Keeps a page that is not here yet; returns the pages that are here no more, or that never came to be."""
        if self._broken:
            return [page_hash]
        slot, left = self.slots.add(page_hash)
        try:
            self._file.write(slot, host_slot)
        except OSError as error:
            log.error("the disk tier takes no more pages: %s", error)
            self._broken = True
            self.slots.discard(page_hash)
            return [page_hash] if left is None else [page_hash, left]
        return [] if left is None else [left]

    def load(self, page_hash: PageHash) -> bool:
        """Reads a page that is here into the bounce buffer; False where it does not read back as it was written, and
        it is forgotten."""
        if self._file.read(self.slots.slot(page_hash)):
            return True
        self.num_spoiled += 1
        log.error("a page of the disk tier is spoiled, %d so far", self.num_spoiled)
        self.slots.discard(page_hash)
        return False

    def clear(self) -> list[PageHash]:
        """Every page leaves, and so does its content; returns the pages."""
        self._file.clear()
        return self.slots.clear()

    def close(self) -> None:
        self._file.close()
