"""A checksum of each page, taken at both ends of a transfer where TransferConfig.checksums is on.

xxh3_64 of the page's bytes, whatever its dtype. On CPU without a copy, about as fast as memory is read.
A page on a GPU is copied to the host first, which makes checksums a debugging aid there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from penstock.types import PageId


def page_checksums(pool: torch.Tensor, pages: Sequence[PageId]) -> list[int]:
    """uint64 of each of `pages`, in order; `pool` is contiguous, [P, ...]. Blocks; mutates nothing."""
    assert pool.is_contiguous()
    bytes_P = pool.view(pool.shape[0], -1).view(torch.uint8)
    if not pool.is_cuda:
        rows_P = bytes_P.numpy()
        return [xxhash.xxh3_64_intdigest(rows_P[page]) for page in pages]
    rows_P = bytes_P[torch.tensor(pages, device=pool.device)].cpu().numpy()
    return [xxhash.xxh3_64_intdigest(row) for row in rows_P]
