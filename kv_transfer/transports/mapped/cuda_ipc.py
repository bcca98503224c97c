"""Implements the transport `cuda_ipc` between GPU pools of one host: exports and opens device memory, and copies on a
stream.

A pool is exported as the driver's handle of its allocation and the pool's offset in it: plain bytes and numbers, sent
to an authenticated peer only (ends.py). Each push is one kernel on a separate stream, and is announced once that stream
is idle, so anything that the receiver launches afterwards sees the bytes. The memory of a dead exporter stays mapped
until the link is closed, so a copy into it does no harm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.cache.pool_memory import TRAILER_BYTES, trailer
from kv_transfer.layout.pages import PageBuffer
from kv_transfer.transports.mapped import cuda_driver
from kv_transfer.transports.mapped.ends import MARK_BYTES, MappedReceiver, MappedSender, has_boot_id, is_mark, new_mark
from kv_transfer.transports.mapped.link import MappedPool
from kv_transfer.transports.transport import ALL_LAYERS, Landing, LayerGroup
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import PageId

NAME = "cuda_ipc"
DEVICE_SETTLE_S = 1.0  # time for the driver to end the kernels of a dead process; a push takes milliseconds

log = logging.getLogger(__name__)


class DeviceMemoryDriver(Protocol):
    """Shares device memory between processes. Raises TransferError if that is impossible."""

    def export(self, tensor: torch.Tensor) -> tuple[bytes, int]:
        """Returns a handle of the allocation that holds a tensor, and the tensor's offset in it in bytes."""

    def open(self, handle: bytes, offset: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Maps bytes of another process's allocation, as uint8 that kernels on `device` can reach."""

    def read(self, opened: torch.Tensor, start: int, num_bytes: int, device: torch.device) -> bytes:
        """Copies opened bytes to the host; blocks. `device` is the one for which they were opened; torch would report
        the device that owns the memory, which this process may not be able to use.
        """

    def close(self, opened: torch.Tensor, device: torch.device) -> None:
        """Unmaps what `open` returned for that device. Neither it nor its views may still be in use."""


def driver_of(pages: PageBuffer) -> DeviceMemoryDriver | None:
    """Returns None if the pool is not on a CUDA device."""
    return cuda_driver.load() if pages.is_cuda and torch.version.cuda is not None else None


def can_send(pages: PageBuffer) -> bool:
    return driver_of(pages) is not None and has_boot_id()


def can_receive(pages: PageBuffer) -> bool:
    return can_send(pages) and trailer(pages.tensor) is not None


def make_receiver(pages: PageBuffer, config: TransferConfig, landing: Landing) -> MappedReceiver:
    """Exports the pool. Raises TransferError if it cannot be shared."""
    driver, end = driver_of(pages), trailer(pages.tensor)
    if driver is None or end is None:
        raise TransferError("the pool is not in device memory that other processes can open")
    handle, offset = driver.export(pages.tensor)
    mark = new_mark()
    end[:MARK_BYTES].copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))  # blocks until it is written
    num_bytes = len(end) + end.storage_offset()
    return MappedReceiver(NAME, pages, [handle, offset, num_bytes, mark], config, landing, DEVICE_SETTLE_S)


def make_sender(pages: PageBuffer, config: TransferConfig, wake: Callable[[], None]) -> MappedSender:
    """Raises TransferError if this process cannot open device memory."""
    driver = driver_of(pages)
    if driver is None or not has_boot_id():
        raise TransferError("shared device memory needs Linux and a pool on a CUDA device")

    def open_pool(greeting: list[object], num_pages: int) -> MappedPool:
        match greeting:
            case [bytes(handle), int(offset), int(num_bytes), bytes(mark)]:
                if not 0 < num_pages * pages.page_bytes <= num_bytes - TRAILER_BYTES:
                    raise TransferError(f"offer.num_pages: {num_pages} of {pages.page_bytes} bytes in {num_bytes}")
                return _MappedMemory(driver, handle, offset, num_bytes, mark, num_pages, pages)
        raise TransferError(f"greeting {str(greeting)[:80]}: want [handle, offset, bytes, mark]")

    return MappedSender(NAME, pages, open_pool, config, wake)


class _MappedMemory:
    """Implements `link.MappedPool`."""

    def __init__(
        self,
        driver: DeviceMemoryDriver,
        handle: bytes,
        offset: int,
        num_bytes: int,
        mark: bytes,
        num_pages: int,
        own: PageBuffer,
    ) -> None:
        """Raises TransferError unless the memory holds the mark."""
        self._driver, self._device = driver, own.device
        self._stream = torch.cuda.Stream(own.device) if own.is_cuda else None
        self._opened: torch.Tensor | None = driver.open(handle, offset, num_bytes, own.device)
        self._pages: PageBuffer | None = None
        self.num_pages = num_pages
        pool_bytes = num_pages * own.page_bytes
        try:
            # Unreachable memory is detected here, where another transport can still be tried.
            if not is_mark(driver.read(self._opened, num_bytes - TRAILER_BYTES, MARK_BYTES, own.device), mark):
                raise TransferError("the opened memory is another process's")
            self._pages = PageBuffer(self._opened[:pool_bytes].view(num_pages, -1))
        except BaseException:
            self.close()
            raise

    def write(
        self,
        source: PageBuffer,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> None:
        if self._pages is None:
            raise TransferError("the receiver's pool is unmapped")
        with torch.cuda.stream(self._stream):  # type: ignore[arg-type]  # None: no effect
            self._pages.copy_part(source, src_pages, dst_pages, layer_group)
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        self._pages = None
        opened, self._opened = self._opened, None
        if opened is not None:
            self._driver.close(opened, self._device)
