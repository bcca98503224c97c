"""Keeps pages that are evicted from host memory in one file of a configured folder.

The file has no name (it is unlinked as soon as it is open) and only its owner can read it: KV reveals the prompts, so
it must not outlive the process. Its size is reserved at the start. A page that is read back must match the checksum of
what was written, which stays in memory: a corrupt page counts as a miss.

`DiskFile` holds the bytes of one rank's pages, by slot, in a separate file. `DiskTier` decides which page is in which
slot, for all ranks at once (`engine.cache.tensor_parallel`).

Reads and writes block the step loop, usually only for a copy to or from the operating system's page cache. A failed
write ends the tier's growth, not the worker: stored pages can still be read.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import xxhash

from engine.cache.page_slots import PageSlots
from penstock.errors import ConfigError
from penstock.types import PageHash

if TYPE_CHECKING:
    from engine.cache.host_tier import HostTier

log = logging.getLogger(__name__)


class SlotFile(Protocol):
    """Implemented by `DiskFile` and `engine.cache.tensor_parallel.AllRanksDiskFile`."""

    def write(self, slot: int, host_slot: int) -> None: ...

    def read(self, slot: int) -> bool: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...


class DiskFile:
    """Owns the file and the checksum of each slot."""

    def __init__(self, folder: str | Path, num_pages: int, host: HostTier) -> None:
        """Raises ConfigError if the folder cannot hold the file."""
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
        """Copies a slot of host memory to a slot of the file. Raises OSError."""
        self._host.settle()
        content = self._host.content(host_slot)
        num_written = os.pwrite(self.file.fileno(), content, slot * self._page_bytes)
        if num_written != self._page_bytes:
            raise OSError(f"{num_written} of {self._page_bytes} bytes written")
        self._checksums[slot] = xxhash.xxh3_64_intdigest(content)

    def read(self, slot: int) -> bool:
        """Reads a slot into the host's bounce buffer. Returns False if the bytes are not those that were written."""
        buffer = self._host.bounce
        try:
            num_read = os.preadv(self.file.fileno(), [buffer], slot * self._page_bytes)
        except OSError as error:
            log.error("reading a page from the disk tier failed: %s", error)
            return False
        return num_read == self._page_bytes and xxhash.xxh3_64_intdigest(buffer) == self._checksums[slot]

    def clear(self) -> None:
        """Erases all slots."""
        os.ftruncate(self.file.fileno(), 0)

    def close(self) -> None:
        self.file.close()


class DiskTier:
    """Decides which page is in which slot, for all ranks at once."""

    def __init__(self, file: SlotFile, num_pages: int) -> None:
        self._file = file
        self.slots = PageSlots(num_pages)
        self._broken = False
        self.num_spoiled = 0  # pages whose bytes had changed when they were read back

    def store(self, page_hash: PageHash, host_slot: int) -> list[PageHash]:
        """Stores a new page; returns the pages that this tier no longer holds, including this one if writing failed."""
        if self._broken:
            return [page_hash]
        slot, evicted = self.slots.add(page_hash)
        try:
            self._file.write(slot, host_slot)
        except OSError as error:
            log.error("writing failed; the disk tier takes no more pages: %s", error)
            self._broken = True
            self.slots.discard(page_hash)
            return [page_hash] if evicted is None else [page_hash, evicted]
        return [] if evicted is None else [evicted]

    def load(self, page_hash: PageHash) -> bool:
        """Reads a stored page into the bounce buffer. Forgets it and returns False if its bytes have changed."""
        if self._file.read(self.slots.slot(page_hash)):
            return True
        self.num_spoiled += 1
        log.error("a page of the disk tier is corrupt, %d so far", self.num_spoiled)
        self.slots.discard(page_hash)
        return False

    def clear(self) -> list[PageHash]:
        """Removes every page and its content; returns the pages."""
        self._file.clear()
        return self.slots.clear()

    def close(self) -> None:
        self._file.close()
