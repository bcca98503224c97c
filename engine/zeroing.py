"""Erases pages that nobody holds any more, where `engine.zero_freed_pages` says so.

Called by the page pool before it can hand the pages out again. Cached pages keep their content, for that is their use;
lower tiers overwrite a slot whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.types import PageId


def zero_pages(kv_pages: torch.Tensor, pages: Sequence[PageId]) -> None:
    """Blocks until the pages are zero: a peer may be given them next, and it knows nothing of streams."""
    if not kv_pages.is_cuda:
        for page in pages:
            kv_pages[page].zero_()
        return
    kv_pages.index_fill_(0, torch.tensor(pages, device=kv_pages.device), 0)
    torch.cuda.current_stream(kv_pages.device).synchronize()
