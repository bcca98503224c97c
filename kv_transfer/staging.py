"""Pages in a receiver's layout, filled from a pool of another layout: what is sent where pages cannot move as they are.
Values that the receiver keeps in another dtype are converted here.

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

from engine.kernels.kv_codes import dequantize, is_quantized, quantize, scales_of, values_of
from kv_transfer.checksum import page_checksums
from kv_transfer.pages import PageBuffer
from kv_transfer.reshard import Plan
from kv_transfer.transport import MAX_PUSH_BYTES
from penstock.types import PageId

STAGING_BYTES = 8 * MAX_PUSH_BYTES  # of one layout
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # numpy has no bfloat16


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
        source, target = values_of(pool, plan.source), values_of(rows, plan.target)
        taken = (slice(None), plan.source_layers, slice(None), plan.source_heads)
        self._source = [field[taken] for field in _fields(source)]
        self._target = _fields(target)
        self._code_dtypes = (source.dtype, target.dtype) if plan.converts else None
        self._dtype: torch.dtype = getattr(torch, plan.target.dtype)
        self._page_size = plan.target.page_size

    def pack(self, pages: Sequence[PageParts], rows: Sequence[PageId]) -> None:
        """Fills rows[i] with pages[i]; places for tokens that a last page does not have are zeroed, as they may hold
        another request's KV. On a GPU on the current stream."""
        if self._code_dtypes or self._target[0].is_cuda:
            self.pack_by_index(pages, rows)
        else:
            self._pack_by_part(pages, rows)

    def _pack_by_part(self, pages: Sequence[PageParts], rows: Sequence[PageId]) -> None:
        for source, target in zip(self._source, self._target, strict=True):
            from_PL2KS, to_RL2KS = source.numpy(), target.numpy()
            for row, parts in zip(rows, pages, strict=True):
                for page, source_token, target_token, count in parts:
                    place = to_RL2KS[row, :, :, :, target_token : target_token + count]
                    np.copyto(place, from_PL2KS[page, :, :, :, source_token : source_token + count])
                to_RL2KS[row, :, :, :, _end(parts) : self._page_size] = 0

    def pack_by_index(self, pages: Sequence[PageParts], rows: Sequence[PageId]) -> None:
        """The same with a kernel for each alignment of parts instead of a copy for each: there are few alignments."""
        aligned: dict[tuple[int, int, int], list[tuple[PageId, PageId]]] = defaultdict(list)
        for row, parts in zip(rows, pages, strict=True):
            for page, source_token, target_token, count in parts:
                aligned[source_token, target_token, count].append((page, row))
            if _end(parts) < self._page_size:
                for field in self._target:
                    field[row, :, :, :, _end(parts) :] = 0
        device = self._target[0].device
        for (source_token, target_token, count), moves in aligned.items():
            index_2M = torch.tensor(moves, dtype=torch.int64).T.contiguous().to(device)
            taken = [field[:, :, :, :, source_token : source_token + count][index_2M[0]] for field in self._source]
            for field, values in zip(self._target, self._convert(taken), strict=True):
                field[:, :, :, :, target_token : target_token + count][index_2M[1]] = values

    def _convert(self, fields: list[torch.Tensor]) -> list[torch.Tensor]:
        """A source's fields, made into the target's."""
        if self._code_dtypes is None:
            return fields
        source_dtype, target_dtype = self._code_dtypes
        rows = fields[0].view(source_dtype)
        if len(fields) == 2:
            rows = dequantize(rows, fields[1].view(torch.float32), self._dtype)
        if len(self._target) == 1:
            return [rows.view(self._target[0].dtype)]
        codes, scales = quantize(rows, target_dtype)
        return [codes.view(torch.uint8), scales.view(torch.int32)]


def _fields(values: torch.Tensor) -> list[torch.Tensor]:
    """What is stored of each token of a pool, as words: its values [P, L, 2, K, S, H], and its scales [P, L, 2, K, S]
    where it has such."""
    fields = [values, scales_of(values)] if is_quantized(values) else [values]
    return [field.view(_WORDS[field.element_size()]) for field in fields]


def _end(parts: PageParts) -> int:
    return parts[-1].target_token + parts[-1].num_tokens


def _make_rows(plan: Plan, num_rows: int, device: torch.device) -> torch.Tensor:
    return torch.empty(plan.target.shape(num_rows), dtype=getattr(torch, plan.target.storage_dtype), device=device)


class Staging:
    """Rows that pushes to receivers of one layout take turns with."""

    def __init__(self, plan: Plan, pool: torch.Tensor, on_room: Callable[[], None]) -> None:
        """`on_room` is called when rows come free after some push found too few."""
        num_rows = max(2, STAGING_BYTES // plan.target.page_bytes)
        rows = _make_rows(plan, num_rows, pool.device)
        self.pages = PageBuffer(rows)
        self._repacker = Repacker(plan, pool, rows)
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # beside the engine's
        if self._stream is not None:  # whatever still writes to memory that is given out again
            self._stream.wait_stream(torch.cuda.current_stream(pool.device))
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
    row = _make_rows(plan, 1, pool.device)
    repacker, checksums = Repacker(plan, pool, row), []
    for parts in page_parts(plan, tokens, src_pages):
        repacker.pack([parts], [PageId(0)])
        checksums += page_checksums(row, [PageId(0)])
    return checksums
