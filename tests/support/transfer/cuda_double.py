"""Provides a double of the CUDA driver for the `cuda_ipc` transport, with memory files on a CPU.

It doubles only the driver: handles of allocations, and opening and closing them. The rest is the transport's own code.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import weakref
from collections.abc import Sequence

import pytest
import torch

from engine.cache.pool_memory import TRAILER_BYTES
from kv_transfer.layout.pages import PageBuffer
from kv_transfer.transports.mapped import cuda_ipc
from penstock.errors import TransferError

_HANDLE = struct.Struct("<qq48x")
_FILE_NAME = "penstock-device"


def allocate(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a pool of zeros on the double's device, with a trailer, as `allocate_with_trailer` does."""
    num_values = math.prod(shape)
    fd = os.memfd_create(_FILE_NAME)
    os.ftruncate(fd, num_values * dtype.itemsize + TRAILER_BYTES)
    size = num_values + TRAILER_BYTES // dtype.itemsize
    memory = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=dtype)
    weakref.finalize(memory.untyped_storage(), os.close, fd)
    return memory[:num_values].view(*shape)


def _file(tensor: torch.Tensor) -> int | None:
    name = "" if tensor.is_cuda else tensor.untyped_storage().filename or ""
    return int(name.rsplit("/", 1)[1]) if name and _FILE_NAME in os.readlink(name) else None


class DriverDouble:
    """Implements `cuda_ipc.DeviceMemoryDriver`."""

    def __init__(self) -> None:
        self.mapped: list[mmap.mmap] = []

    def export(self, tensor: torch.Tensor) -> tuple[bytes, int]:
        fd = _file(tensor)
        assert fd is not None
        return _HANDLE.pack(os.getpid(), fd), 0

    def open(self, handle: bytes, offset: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        if len(handle) != _HANDLE.size:
            raise TransferError("no handle")
        pid, fd = _HANDLE.unpack(handle)
        own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        try:
            self.mapped.append(mmap.mmap(own_fd, os.fstat(own_fd).st_size))
        finally:
            os.close(own_fd)
        return torch.frombuffer(self.mapped[-1], dtype=torch.uint8, offset=offset, count=num_bytes)

    def read(self, opened: torch.Tensor, start: int, num_bytes: int, device: torch.device) -> bytes:
        return opened[start : start + num_bytes].numpy().tobytes()

    def close(self, opened: torch.Tensor, device: torch.device) -> None:
        address = opened.data_ptr()
        self.mapped = [file for file in self.mapped if torch.frombuffer(file, dtype=torch.uint8).data_ptr() != address]


def install(patch: pytest.MonkeyPatch) -> DriverDouble:
    """Makes pools that `allocate` returned count as a GPU's for the `cuda_ipc` transport."""
    double, real = DriverDouble(), cuda_ipc.driver_of

    def driver_of(pages: PageBuffer) -> cuda_ipc.DeviceMemoryDriver | None:
        return double if _file(pages.tensor) is not None else real(pages)

    patch.setattr(cuda_ipc, "driver_of", driver_of)
    return double
