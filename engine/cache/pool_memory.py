"""Allocates the memory of a page pool, which peers on this host may map for transfers without a network.

On a CPU it is a memfd. It has no name, so nothing is left behind however the process ends, and no size limit except
that of memory itself. A peer opens it through this process's entry in /proc, which the kernel allows only to the same
user. Its size is sealed, so a peer can rely on every page being there. On a GPU it is device memory as torch allocates
it, which the driver can share.

Behind the pages is a trailer that the pool itself never uses: the owner writes a proof of identity there when it shares
the pool.
"""

from __future__ import annotations

import fcntl
import logging
import math
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from penstock.types import PageId

FILE_NAME = "penstock-kv"
TRAILER_BYTES = mmap.PAGESIZE
SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)
_FD_FOLDER = "/proc/self/fd/"

log = logging.getLogger(__name__)


def allocate_pool(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros; on a CPU in memory that can be shared, if the system has such memory.

    The content must be zeroed: attention multiplies masked places by 0, which NaN would survive.
    """
    if device.type != "cpu":
        return allocate_with_trailer(shape, dtype, device)
    if not hasattr(os, "memfd_create"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    num_values = math.prod(shape)
    num_bytes = num_values * dtype.itemsize
    try:
        fd = create_memory_file(FILE_NAME, file_bytes(num_bytes))
    except OSError as error:
        log.warning("KV pages cannot be shared with processes on this host: %s", error)
        return torch.zeros(*shape, dtype=dtype, device=device)
    try:
        pool = torch.from_file(f"{_FD_FOLDER}{fd}", shared=True, size=num_values, dtype=dtype).view(*shape)
    except BaseException:
        os.close(fd)
        raise
    weakref.finalize(pool.untyped_storage(), os.close, fd)  # when the last tensor over it is gone
    return pool


def file_bytes(num_bytes: int) -> int:
    """Returns the size of the file behind a pool of `num_bytes`, trailer included."""
    return -(-num_bytes // TRAILER_BYTES) * TRAILER_BYTES + TRAILER_BYTES


def create_memory_file(name: str, num_bytes: int) -> int:
    """Returns the descriptor of a file without a path, of zeros, whose size is sealed. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def shared_file(pool: torch.Tensor) -> int | None:
    """Returns the file descriptor behind a pool that `allocate_pool` made shared, else None. The pool owns it."""
    name = None if pool.is_cuda else pool.untyped_storage().filename
    return int(name.removeprefix(_FD_FOLDER)) if name and name.startswith(_FD_FOLDER) else None


def allocate_with_trailer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros in plain memory of the device, with a trailer behind them."""
    num_values = math.prod(shape)
    memory = torch.zeros(num_values + TRAILER_BYTES // dtype.itemsize, dtype=dtype, device=device)
    return memory[:num_values].view(*shape)


def trailer(pool: torch.Tensor) -> torch.Tensor | None:
    """Returns the trailer of a pool that `allocate_with_trailer` made, else None."""
    storage = pool.untyped_storage()
    if pool.storage_offset() or storage.nbytes() != pool.nbytes + TRAILER_BYTES:
        return None
    return torch.empty(0, dtype=torch.uint8, device=pool.device).set_(storage)[-TRAILER_BYTES:]


def zero_pages(kv_pages: torch.Tensor, pages: Sequence[PageId]) -> None:
    """Erases pages that nobody holds, for `engine.zero_freed_pages`.

    The page pool calls it before it can hand the pages out again. Blocks until they are zero, because their next owner
    may be a peer, which knows nothing of streams. Cached pages keep their content, and lower tiers overwrite whole
    slots.
    """
    if not kv_pages.is_cuda:
        for page in pages:
            kv_pages[page].zero_()
        return
    kv_pages.index_fill_(0, torch.tensor(pages, device=kv_pages.device), 0)
    torch.cuda.current_stream(kv_pages.device).synchronize()
