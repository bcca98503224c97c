"""Where the KV pages of a pool live: memory that peers on this host may map, for transfers without a wire.

On a CPU a memfd: it has no name, so nothing is left behind however the process ends, and no size limit but memory's
own. A peer opens it through this process's entry in /proc, which the kernel allows to the same user alone. Its size is
sealed, so that no peer can be made to touch pages that are gone. On a GPU device memory as torch allocates it, which
the driver can share.

After the pages comes a trailer that the pool itself never uses: whoever shares the pool proves there which file it is.
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

FILE_NAME = "penstock-kv"
TRAILER_BYTES = mmap.PAGESIZE
SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0) | getattr(fcntl, "F_SEAL_SEAL", 0)
_FD_FOLDER = "/proc/self/fd/"

log = logging.getLogger(__name__)


def allocate_pool(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU in memory that can be shared, wherever the system has such. Zeros and not whatever was there:
    attention multiplies masked places by 0, which NaN would survive."""
    if device.type != "cpu":
        return allocate_with_trailer(shape, dtype, device)
    if not hasattr(os, "memfd_create"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    num_values = math.prod(shape)
    num_bytes = num_values * dtype.itemsize
    try:
        fd = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        log.warning("KV pages cannot be shared with processes on this host: %s", error)
        return torch.zeros(*shape, dtype=dtype, device=device)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, -(-num_bytes // TRAILER_BYTES) * TRAILER_BYTES + TRAILER_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        pool = torch.from_file(f"{_FD_FOLDER}{fd}", shared=True, size=num_values, dtype=dtype).view(*shape)
    except BaseException:
        os.close(fd)
        raise
    weakref.finalize(pool.untyped_storage(), os.close, fd)  # with the last tensor on it
    return pool


def shared_file(pool: torch.Tensor) -> int | None:
    """The file descriptor behind a pool that `allocate_pool` made shared, else None. It stays the pool's own."""
    name = None if pool.is_cuda else pool.untyped_storage().filename
    return int(name.removeprefix(_FD_FOLDER)) if name and name.startswith(_FD_FOLDER) else None


def allocate_with_trailer(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, in plain memory of the device."""
    num_values = math.prod(shape)
    memory = torch.zeros(num_values + TRAILER_BYTES // dtype.itemsize, dtype=dtype, device=device)
    return memory[:num_values].view(*shape)


def trailer(pool: torch.Tensor) -> torch.Tensor | None:
    """The bytes behind a pool that `allocate_with_trailer` made, else None."""
    storage = pool.untyped_storage()
    if pool.storage_offset() or storage.nbytes() != pool.nbytes + TRAILER_BYTES:
        return None
    return torch.empty(0, dtype=torch.uint8, device=pool.device).set_(storage)[-TRAILER_BYTES:]
