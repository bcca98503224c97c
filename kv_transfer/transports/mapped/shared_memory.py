"""Implements the transport `shm` between CPU pools of one host: exports and maps the file that holds a pool.

The file has no name, only a descriptor of the receiver's process (ends.py has the rest).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

import torch

from engine.cache.pool_memory import FILE_NAME, SEALS, TRAILER_BYTES, shared_file
from kv_transfer.layout.pages import PageBuffer
from kv_transfer.transports.mapped.ends import MappedReceiver, MappedSender, has_boot_id, is_mark, new_mark
from kv_transfer.transports.mapped.link import MappedPool
from kv_transfer.transports.transport import ALL_LAYERS, Landing, LayerGroup
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import PageId

NAME = "shm"


def can_send(pages: PageBuffer) -> bool:
    return not pages.is_cuda and has_boot_id()


def can_receive(pages: PageBuffer) -> bool:
    return can_send(pages) and shared_file(pages.tensor) is not None


def make_receiver(pages: PageBuffer, config: TransferConfig, landing: Landing) -> MappedReceiver:
    """Exports the pool. Raises TransferError if it is not in shareable memory."""
    fd = shared_file(pages.tensor)
    if fd is None or pages.tensor.storage_offset():
        raise TransferError("the pool is not in memory that other processes can map")
    mark = new_mark()
    os.pwrite(fd, mark, os.fstat(fd).st_size - TRAILER_BYTES)
    return MappedReceiver(NAME, pages, [os.getpid(), fd, mark], config, landing)


def make_sender(pages: PageBuffer, config: TransferConfig, wake: Callable[[], None]) -> MappedSender:
    """Raises TransferError if this process cannot map pools."""
    if not can_send(pages):
        raise TransferError("shared memory needs Linux and a CPU pool")

    def open_pool(greeting: list[object], num_pages: int) -> MappedPool:
        match greeting:
            case [int(pid), int(fd), bytes(mark)]:
                return _map_pool(pid, fd, mark, num_pages, pages.page_bytes)
        raise TransferError(f"greeting {str(greeting)[:80]}: want [pid, fd, mark]")

    return MappedSender(NAME, pages, open_pool, config, wake)


class _MappedFile:
    """Implements `link.MappedPool`."""

    def __init__(self, pages: PageBuffer) -> None:
        self._pages: PageBuffer | None = pages
        self.num_pages = pages.num_pages

    def write(
        self,
        source: PageBuffer,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> None:
        if self._pages is None:
            raise TransferError("the receiver's pool is unmapped")
        self._pages.copy_part(source, src_pages, dst_pages, layer_group)

    def close(self) -> None:
        self._pages = None  # the mapping ends with its last tensor


def _map_pool(pid: int, fd: int, mark: bytes, num_pages: int, page_bytes: int) -> MappedPool:
    """Maps the receiver's pool. Raises OSError or TransferError for anything else at that path."""
    path = f"/proc/{pid}/fd/{fd}"
    kind = os.readlink(path)
    if not kind.startswith(
        f"/memfd:{FILE_NAME} "
    ):  # checked first, because opening another kind of file may block or have side effects
        raise TransferError(f"{path} is {kind!r}, not a pool")
    own_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(own_fd).st_size
        if fcntl.fcntl(own_fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise TransferError(f"{path} could shrink while it is mapped")
        if not 0 < num_pages * page_bytes <= size - TRAILER_BYTES:
            raise TransferError(f"offer.num_pages: {num_pages} of {page_bytes} bytes, the pool's file has {size}")
        mapped = mmap.mmap(own_fd, size)
    finally:
        os.close(own_fd)
    if not is_mark(mapped[-TRAILER_BYTES:][: len(mark)], mark):
        raise TransferError(f"{path} is another process's pool: the ends do not see the same processes")
    bytes_P = torch.frombuffer(mapped, dtype=torch.uint8, count=num_pages * page_bytes)
    return _MappedFile(PageBuffer(bytes_P.view(num_pages, page_bytes)))
