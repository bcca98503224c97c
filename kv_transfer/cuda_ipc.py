"""The wire between GPU pools of one host: the sender opens the receiver's device memory and copies pages into it with
one kernel a push, on a stream of its own beside the engine's (direct.py).

Here is how a pool is shown and opened: by the driver's handle of the allocation that it lies in, and its place in
there. Plain bytes and numbers, sent to an authenticated peer only. A push is announced when the copy's stream has come
to rest: whatever the receiver launches afterwards reads the bytes. Memory of an exporter that has died stays mapped
until the link is closed, so a copy into it harms nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.shared_pool import TRAILER_BYTES, trailer
from kv_transfer import cuda_driver
from kv_transfer.direct import MARK_BYTES, DirectReceiver, DirectSender, has_boot_id, is_mark, new_mark
from kv_transfer.direct_link import MappedPool
from kv_transfer.pages import PageBuffer
from kv_transfer.transport import WHOLE, Landing, Part
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import PageId

NAME = "cuda_ipc"

log = logging.getLogger(__name__)


class Driver(Protocol):
    """What a device's memory is shared with. Raises TransferError where that cannot be done."""

    def export(self, tensor: torch.Tensor) -> tuple[bytes, int]:
        """A handle of the allocation that a tensor lies in, and where in there it begins, in bytes."""

    def open(self, handle: bytes, offset: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Those bytes of another process's allocation, as uint8 that kernels of `device` can reach."""

    def close(self, opened: torch.Tensor, device: torch.device) -> None:
        """Unmaps what `open` gave for that device. Nothing may use it any more, nor its views."""


def driver_of(pages: PageBuffer) -> Driver | None:
    """None where the pool is not on a CUDA device."""
    return cuda_driver.load() if pages.is_cuda and torch.version.cuda is not None else None


def can_send(pages: PageBuffer) -> bool:
    return driver_of(pages) is not None and has_boot_id()


def can_receive(pages: PageBuffer) -> bool:
    return can_send(pages) and trailer(pages.tensor) is not None


def make_receiver(pages: PageBuffer, config: TransferConfig, landing: Landing) -> DirectReceiver:
    """Raises TransferError where the pool cannot be shared."""
    driver, end = driver_of(pages), trailer(pages.tensor)
    if driver is None or end is None:
        raise TransferError("the pool is not in device memory that can be shared")
    handle, offset = driver.export(pages.tensor)
    mark = new_mark()
    end[:MARK_BYTES].copy_(torch.frombuffer(bytearray(mark), dtype=torch.uint8))  # blocks until it is there
    num_bytes = len(end) + end.storage_offset()
    return DirectReceiver(NAME, pages, [handle, offset, num_bytes, mark], config, landing)


def make_sender(pages: PageBuffer, config: TransferConfig, wake: Callable[[], None]) -> DirectSender:
    """Raises TransferError where device memory cannot be opened."""
    driver = driver_of(pages)
    if driver is None or not has_boot_id():
        raise TransferError("memory of GPUs that processes share needs Linux and a pool on a CUDA device")

    def open_pool(greeting: list[object], num_pages: int) -> MappedPool:
        match greeting:
            case [bytes(handle), int(offset), int(num_bytes), bytes(mark)]:
                if not 0 < num_pages * pages.page_bytes <= num_bytes - TRAILER_BYTES:
                    raise TransferError(f"offer.num_pages: {num_pages} of {pages.page_bytes} bytes in {num_bytes}")
                return _MappedMemory(driver, handle, offset, num_bytes, mark, num_pages, pages)
        raise TransferError(f"greeting {str(greeting)[:80]}: want [handle, offset, bytes, mark]")

    return DirectSender(NAME, pages, open_pool, config, wake)


class _MappedMemory:
    """See `direct_link.MappedPool`."""

    def __init__(
        self,
        driver: Driver,
        handle: bytes,
        offset: int,
        num_bytes: int,
        mark: bytes,
        num_pages: int,
        own: PageBuffer,
    ) -> None:
        """Raises TransferError unless the memory shows the mark."""
        self._driver, self._device = driver, own.device
        self._stream = torch.cuda.Stream(own.device) if own.is_cuda else None
        self._opened: torch.Tensor | None = driver.open(handle, offset, num_bytes, own.device)
        self._pages: PageBuffer | None = None
        self.num_pages = num_pages
        pool_bytes = num_pages * own.page_bytes
        try:
            found = PageBuffer.staging(1, TRAILER_BYTES, own.device)
            if self._stream is not None:  # whatever still writes to memory that is given out again
                self._stream.wait_stream(torch.cuda.current_stream(own.device))
            # With the copy that pages take: what it cannot reach shows here, where another wire can still be tried.
            self._copy(found, PageBuffer(self._opened[-TRAILER_BYTES:].view(1, -1)), [PageId(0)], [PageId(0)])
            if not is_mark(found.tensor[0, :MARK_BYTES].cpu().numpy().tobytes(), mark):
                raise TransferError("the memory that was opened is another process's")
            self._pages = PageBuffer(self._opened[:pool_bytes].view(num_pages, -1))
        except BaseException:
            self.close()
            raise

    def write(
        self, source: PageBuffer, src_pages: Sequence[PageId], dst_pages: Sequence[PageId], part: Part = WHOLE
    ) -> None:
        assert self._pages is not None, "closed"
        self._copy(self._pages, source, src_pages, dst_pages, part)

    def _copy(
        self,
        to: PageBuffer,
        source: PageBuffer,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        part: Part = WHOLE,
    ) -> None:
        with torch.cuda.stream(self._stream):  # type: ignore[arg-type]  # None: no effect
            to.copy_part(source, src_pages, dst_pages, part)
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        self._pages = None
        opened, self._opened = self._opened, None
        if opened is not None:
            self._driver.close(opened, self._device)
