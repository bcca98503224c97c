"""Pages in a receiver's layout, filled from a pool of another layout: what is sent where pages cannot move as they are.

Sits before the wires: they take rows of this buffer as they take pages of the pool, and know of no layout. Bounded:
rows are taken when a push starts and given back when it has ended; a push that finds too few waits. Used by the
sender's thread alone.

Shape suffixes: P pages of the pool, R rows (pages of the receiver's size), L layers, K KV heads, S tokens, H head dim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kv_transfer.checksum import page_checksums
from kv_transfer.pages import PageBuffer
from kv_transfer.reshard import Plan
from kv_transfer.transport import MAX_PUSH_BYTES
from penstock.types import PageId

STAGING_BYTES = 8 * MAX_PUSH_BYTES  # of one layout
_WORDS = {2: torch.int16, 4: torch.int32}  # numpy has no bfloat16


class Part(NamedTuple):
    """Tokens of one page of the pool, and where they stand in a page of the receiver's."""

    page: PageId
    source_token: int
    target_token: int
    num_tokens: int


PageParts = tuple[Part, ...]  # what one page of the receiver's is made of


def page_parts(plan: Plan, tokens: range, src_pages: Sequence[PageId]) -> list[PageParts]:
    """For each of the receiver's pages that hold `tokens`, what it is made of; `src_pages` are the sequence's first
    ones in the pool."""
    found: dict[int, list[Part]] = defaultdict(list)
    for piece in plan.pieces(tokens):
        part = Part(src_pages[piece.source_page], piece.source_token, piece.target_token, piece.num_tokens)
        found[piece.target_page].append(part)
    return [tuple(parts) for parts in found.values()]


class Repacker:
    """Copies parts of a pool's pages into rows in the layout of a plan's target. Owns neither."""

    def __init__(self, plan: Plan, pool: torch.Tensor, rows: torch.Tensor) -> None:
        words = _WORDS[pool.element_size()]
        num_pages, num_rows = pool.shape[0], rows.shape[0]
        pages_PL2KSH = pool.view(words).view(plan.source.shape(num_pages))
        self._pages_PL2KSH = pages_PL2KSH[:, plan.source_layers, :, plan.source_heads]
        self._rows_RL2KSH = rows.view(words).view(plan.target.shape(num_rows))
        self._page_size = plan.target.page_size

    def pack(self, pages: Sequence[PageParts], rows: Sequence[PageId]) -> None:
        """Fills rows[i] with pages[i]; places for tokens that a last page does not have are zeroed, as they may hold
        another request's KV. On a GPU on the current stream."""
        if self._rows_RL2KSH.is_cuda:
            self.pack_by_index(pages, rows)
        else:
            self._pack_by_part(pages, rows)

    def _pack_by_part(self, pages: Sequence[PageParts], rows: Sequence[PageId]) -> None:
        source, target = self._pages_PL2KSH.numpy(), self._rows_RL2KSH.numpy()
        for row, parts in zip(rows, pages, strict=True):
            for page, source_token, target_token, count in parts:
                place = target[row, ..., target_token : target_token + count, :]
                np.copyto(place, source[page, ..., source_token : source_token + count, :])
            target[row, ..., _end(parts) : self._page_size, :] = 0

    def pack_by_index(self, pages: Sequence[PageParts], rows: Sequence[PageId]) -> None:
        """The same with a kernel for each alignment of parts instead of a copy for each: there are few alignments."""
        aligned: dict[tuple[int, int, int], list[tuple[PageId, PageId]]] = defaultdict(list)
        for row, parts in zip(rows, pages, strict=True):
            for page, source_token, target_token, count in parts:
                aligned[source_token, target_token, count].append((page, row))
            if _end(parts) < self._page_size:
                self._rows_RL2KSH[row, ..., _end(parts) :, :] = 0
        device = self._pages_PL2KSH.device
        for (source_token, target_token, count), moves in aligned.items():
            index_2M = torch.tensor(moves, dtype=torch.int64).T.contiguous().to(device)
            taken = self._pages_PL2KSH[..., source_token : source_token + count, :].index_select(0, index_2M[0])
            self._rows_RL2KSH[..., target_token : target_token + count, :].index_copy_(0, index_2M[1], taken)


def _end(parts: PageParts) -> int:
    return parts[-1].target_token + parts[-1].num_tokens


class Staging:
    """Rows that pushes to receivers of one layout take turns with."""

    def __init__(self, plan: Plan, pool: torch.Tensor, on_room: Callable[[], None]) -> None:
        """`on_room` is called when rows come free after some push found too few."""
        num_rows = max(2, STAGING_BYTES // plan.target.page_bytes)
        rows = torch.empty(plan.target.shape(num_rows), dtype=pool.dtype, device=pool.device)
        self.pages = PageBuffer(rows)
        self._repacker = Repacker(plan, pool, rows)
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # beside the engine's
        self._free = [PageId(row) for row in range(num_rows)]
        self._on_room = on_room
        self._starved = False

    @property
    def num_free(self) -> int:
        return len(self._free)

    def stage(self, pages: Sequence[PageParts], num_held: int) -> list[PageId] | None:
        """Rows that hold those pages, whose parts are complete in memory; None where too few are free for one who holds
        `num_held` already. Nobody gets more than about half, so a receiver that stands still leaves room to others."""
        too_greedy = num_held > 0 and num_held + len(pages) > len(self._free)
        if too_greedy or len(pages) > len(self._free):
            self._starved = True
            return None
        rows, self._free = self._free[: len(pages)], self._free[len(pages) :]
        with torch.cuda.stream(self._stream):  # type: ignore[arg-type]  # None: no effect
            self._repacker.pack(pages, rows)
        if self._stream is not None:
            self._stream.synchronize()
        return rows

    def release(self, rows: Sequence[PageId]) -> None:
        """Nothing reads those rows any more."""
        self._free += rows
        if self._starved:
            self._starved = False
            self._on_room()


def sent_checksums(plan: Plan, pool: torch.Tensor, tokens: range, src_pages: Sequence[PageId]) -> list[int]:
    """Of each of the receiver's pages that `tokens` make, as it will hold them, taken from the pool itself. `tokens`
    begins one of those pages; `src_pages` are the sequence's, from its first token on. Blocks."""
    if plan.whole_pages:
        size = plan.target.page_size
        return page_checksums(pool, src_pages[tokens.start // size : -(-tokens.stop // size)])
    row = torch.empty(plan.target.shape(1), dtype=pool.dtype, device=pool.device)
    repacker, checksums = Repacker(plan, pool, row), []
    for parts in page_parts(plan, tokens, src_pages):
        repacker.pack([parts], [PageId(0)])
        checksums += page_checksums(row, [PageId(0)])
    return checksums
