"""Copies index arrays from the host to a device without waiting for it. Holds no state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

PageList = Sequence[int] | torch.Tensor  # page numbers; a tensor is int64 and on the device that copies the pages


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Uploads to a GPU through pinned memory, because the driver may wait for the stream before it copies pageable
    memory. On a CPU nothing is copied."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def upload_pages(pages: PageList, device: torch.device) -> torch.Tensor:
    """Returns the page numbers as int64 on the device; a tensor there is returned as it is."""
    if not isinstance(pages, torch.Tensor):
        return upload(np.array(pages, dtype=np.int64), device)
    assert (pages.dtype, pages.device) == (torch.int64, device), f"pages are {pages.dtype} on {pages.device}"
    return pages
