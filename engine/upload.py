"""Plain numbers on their way to a device, without a wait for it. Holds no state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

PageList = Sequence[int] | torch.Tensor  # pages by number; a tensor is int64 and on the device that copies them


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """To a GPU through pinned memory: from any other the driver may wait for the stream first. On a CPU no copy."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def upload_pages(pages: PageList, device: torch.device) -> torch.Tensor:
    """int64 on the device; what is there already stays where it is."""
    if not isinstance(pages, torch.Tensor):
        return upload(np.array(pages, dtype=np.int64), device)
    assert (pages.dtype, pages.device) == (torch.int64, device), f"pages are {pages.dtype} on {pages.device}"
    return pages
