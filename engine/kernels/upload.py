"""Copies index arrays from the host to a device without waiting for it. Holds no state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_TYPES = {np.dtype(name): getattr(torch, name) for name in ("int32", "int64", "float32", "float64")}
_ALIGNMENT = 16  # bytes; Triton compiles other variants for pointers with less

PageList = Sequence[int] | torch.Tensor  # page numbers; a tensor is int64 and on the device that copies the pages


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Uploads to a GPU through pinned memory, because the driver may wait for the stream before it copies pageable
    memory. On a CPU nothing is copied."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def upload_all(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Uploads as `upload` does, but all arrays by one copy out of one pinned buffer, since each copy costs a launch
    however small it is. On a GPU the tensors are parts of one, each at a multiple of 16 bytes."""
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    buffer = torch.empty(max(starts[-1], _ALIGNMENT), dtype=torch.uint8, pin_memory=True)
    packed = buffer.numpy()
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.nbytes].view(array.dtype)[:] = array.ravel()
    on_device = buffer.to(device, non_blocking=True)
    return [
        on_device[start : start + array.nbytes].view(_TYPES[array.dtype]).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def upload_pages(pages: PageList, device: torch.device) -> torch.Tensor:
    """Returns the page numbers as int64 on the device; a tensor there is returned as it is."""
    if not isinstance(pages, torch.Tensor):
        return upload(np.array(pages, dtype=np.int64), device)
    assert (pages.dtype, pages.device) == (torch.int64, device), f"pages are {pages.dtype} on {pages.device}"
    return pages
