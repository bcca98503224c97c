"""Computes checksums of pages, at both ends of a transfer if TransferConfig.checksums is on.

They cover a page's bytes, whatever their dtype, and are the same on every device (`engine.kernels.checksum_words`). A
pool is read in place, about as fast as memory allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from engine.kernels.page_checksum import select_checksum
from kv_transfer.layout.pages import PageBuffer, rows_of_pages
from kv_transfer.layout.reshard import WHOLE_PAGE, PageRows
from penstock.types import PageId

_WORD_BYTES = 4


def page_checksums(pool: torch.Tensor, pages: Sequence[PageId]) -> list[int]:
    """Returns one uint64 for each of `pages`, in order. `pool` is contiguous, [P, ...]. Blocks; mutates nothing."""
    if not pool.is_contiguous():
        raise ValueError(f"pool: shape {tuple(pool.shape)} is not contiguous")
    bytes_P = pool.view(pool.shape[0], -1).view(torch.uint8)
    if bytes_P.shape[1] % _WORD_BYTES:
        raise ValueError(f"pool: pages of {bytes_P.shape[1]} bytes; a page must be a multiple of {_WORD_BYTES} bytes")
    return select_checksum(pool.device.type)(bytes_P.view(torch.int32), pages)


def row_checksums(pool: torch.Tensor, pages: Sequence[PageId], rows: PageRows) -> list[int]:
    """Returns what `page_checksums` would if some rows of each page were the whole page."""
    if rows == WHOLE_PAGE:
        return page_checksums(pool, pages)
    whole = PageBuffer(pool).in_rows(rows.num_in_page)
    index = torch.tensor(rows_of_pages(pages, rows.num_in_page, rows.places), device=pool.device)
    parts = whole.rows_PW[index].view(len(pages), -1)
    return page_checksums(parts, [PageId(page) for page in range(len(pages))])


def join_checksums(by_part: Sequence[Sequence[int]]) -> list[int]:
    """Combines the checksums of the parts of pages into one for each page. Every part lists the same pages."""
    if len(by_part) == 1:
        return list(by_part[0])
    return [
        xxhash.xxh3_64_intdigest(b"".join(checksum.to_bytes(8, "little") for checksum in parts))
        for parts in zip(*by_part, strict=True)
    ]


def join_parts(full: Sequence[int], windowed: Sequence[int]) -> list[int]:
    """Combines the checksums of pages with two parts, of which only the last ones have a windowed part."""
    first = len(full) - len(windowed)
    return [*full[:first], *join_checksums((full[first:], windowed))]
