"""The wire between CPU pools of one host: the sender maps the receiver's pool and copies pages into it (direct.py).

Here is how a pool is shown and opened: by its file, which has no name but a place among the receiver's descriptors.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

import torch

from engine.shared_pool import FILE_NAME, SEALS, TRAILER_BYTES, shared_file
from kv_transfer.direct import DirectReceiver, DirectSender, has_boot_id, is_mark, new_mark
from kv_transfer.direct_link import MappedPool
from kv_transfer.pages import PageBuffer
from kv_transfer.transport import WHOLE, Landing, Part
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import PageId

NAME = "shm"


def can_send(pages: PageBuffer) -> bool:
    return not pages.is_cuda and has_boot_id()


def can_receive(pages: PageBuffer) -> bool:
    return can_send(pages) and shared_file(pages.tensor) is not None


def make_receiver(pages: PageBuffer, config: TransferConfig, landing: Landing) -> DirectReceiver:
    """Raises TransferError where the pool cannot be shared."""
    fd = shared_file(pages.tensor)
    if fd is None or pages.tensor.storage_offset():
        raise TransferError("the pool is not in memory that can be shared")
    mark = new_mark()
    os.pwrite(fd, mark, os.fstat(fd).st_size - TRAILER_BYTES)
    return DirectReceiver(NAME, pages, [os.getpid(), fd, mark], config, landing)


def make_sender(pages: PageBuffer, config: TransferConfig, wake: Callable[[], None]) -> DirectSender:
    """Raises TransferError where pools cannot be mapped."""
    if not can_send(pages):
        raise TransferError("pools in memory that processes share need Linux and a CPU pool")

    def open_pool(greeting: list[object], num_pages: int) -> MappedPool:
        match greeting:
            case [int(pid), int(fd), bytes(mark)]:
                return _map_pool(pid, fd, mark, num_pages, pages.page_bytes)
        raise TransferError(f"greeting {str(greeting)[:80]}: want [pid, fd, mark]")

    return DirectSender(NAME, pages, open_pool, config, wake)


class _MappedFile:
    """See `direct_link.MappedPool`."""

    def __init__(self, pages: PageBuffer) -> None:
        self._pages: PageBuffer | None = pages
        self.num_pages = pages.num_pages

    def write(
        self, source: PageBuffer, src_pages: Sequence[PageId], dst_pages: Sequence[PageId], part: Part = WHOLE
    ) -> None:
        assert self._pages is not None, "closed"
        self._pages.copy_part(source, src_pages, dst_pages, part)

    def close(self) -> None:
        self._pages = None  # with its last tensor the mapping goes


def _map_pool(pid: int, fd: int, mark: bytes, num_pages: int, page_bytes: int) -> MappedPool:
    """The receiver's pool in this process's memory. Raises OSError or TransferError for anything that is not it."""
    path = f"/proc/{pid}/fd/{fd}"
    kind = os.readlink(path)
    if not kind.startswith(f"/memfd:{FILE_NAME} "):  # before it is opened: another kind of file might block or act
        raise TransferError(f"{path} is {kind!r}, no pool")
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
