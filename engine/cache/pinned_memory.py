"""Allocates pinned host memory of exactly the requested size, which a GPU reads and writes directly.

Torch's own pinned memory is rounded up to a power of two: a host tier of 130 GiB would take 256.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Sequence

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


def allocate_pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns zeros in pinned memory, which is released with the last tensor over it.

    Blocks while the kernel provides and pins the pages, which takes a few tenths of a second per GiB. Raises
    RuntimeError if the memory is missing or CUDA refuses.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"{num_bytes} bytes of host memory: {error}") from error
    flat = torch.frombuffer(memory, dtype=dtype, count=math.prod(shape))
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(flat.data_ptr(), len(memory), _PORTABLE))
    if code:
        raise RuntimeError(f"{num_bytes} bytes of host memory cannot be pinned: CUDA error {code}; see ulimit -l")
    weakref.finalize(flat.untyped_storage(), cudart.cudaHostUnregister, flat.data_ptr())
    return flat.view(*shape)
