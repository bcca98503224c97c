"""Repacks pages of the pool into a receiver's layout, in a bounded buffer of staging rows.

It serves pages that cannot move unchanged, and converts values that the receiver stores in another dtype. Transports,
which know no layouts, take rows of this buffer like pages of the pool. Rows are taken when a push starts and released
when it has ended; a push that finds too few rows waits. Only the sender's thread uses it.

Shape suffixes: P pages of the pool, R rows (pages of the receiver's size), L layers, K KV heads, S tokens, H head dim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.kernels.kv_quantization import dequantize, is_quantized, quantize, scales_of, values_of
from kv_transfer.layout.checksum import page_checksums
from kv_transfer.layout.pages import PageBuffer
from kv_transfer.layout.reshard import ReshardPlan
from penstock.types import PageId

STAGING_BYTES = 64 << 20  # for each layout: eight pushes of transport.MAX_PUSH_BYTES
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # numpy has no bfloat16


class PageSlice(NamedTuple):
    """Tokens of one page of the pool, and their position in a page of the receiver."""

    page: PageId
    source_token: int
    target_token: int
    num_tokens: int


PageSlices = tuple[PageSlice, ...]  # the slices of one page of the receiver


def page_slices(plan: ReshardPlan, tokens: range, src_pages: Sequence[PageId]) -> list[PageSlices]:
    """Returns the slices of each of the receiver's pages that hold `tokens`. `src_pages` are the sequence's pages in
    the pool, from its first token on.
    """
    by_page: dict[int, list[PageSlice]] = defaultdict(list)
    for run in plan.token_runs(tokens):
        part = PageSlice(src_pages[run.source_page], run.source_token, run.target_token, run.num_tokens)
        by_page[run.target_page].append(part)
    return [tuple(slices) for slices in by_page.values()]


class Repacker:
    """Copies slices of a pool's pages into rows of a plan's target layout. Owns neither."""

    def __init__(self, plan: ReshardPlan, pool: torch.Tensor, rows: torch.Tensor) -> None:
        source, target = values_of(pool, plan.source), values_of(rows, plan.target)
        taken = (slice(None), plan.source_layers, slice(None), plan.source_heads)
        self._source = [field[taken] for field in _fields(source)]
        self._target = _fields(target)
        self._code_dtypes = (source.dtype, target.dtype) if plan.converts else None
        self._dtype: torch.dtype = getattr(torch, plan.target.dtype)
        self._page_size = plan.target.page_size

    def pack(self, pages: Sequence[PageSlices], rows: Sequence[PageId]) -> None:
        """Fills rows[i] with pages[i]. Zeroes the slots after the last page's tokens, which may hold another request's
        KV. On a GPU it runs on the current stream.
        """
        if self._code_dtypes or self._target[0].is_cuda:
            self.pack_by_index(pages, rows)
        else:
            self._pack_by_slice(pages, rows)

    def _pack_by_slice(self, pages: Sequence[PageSlices], rows: Sequence[PageId]) -> None:
        for source, target in zip(self._source, self._target, strict=True):
            from_PL2KS, to_RL2KS = source.numpy(), target.numpy()
            for row, slices in zip(rows, pages, strict=True):
                for page, source_token, target_token, count in slices:
                    place = to_RL2KS[row, :, :, :, target_token : target_token + count]
                    np.copyto(place, from_PL2KS[page, :, :, :, source_token : source_token + count])
                to_RL2KS[row, :, :, :, _end(slices) : self._page_size] = 0

    def pack_by_index(self, pages: Sequence[PageSlices], rows: Sequence[PageId]) -> None:
        """Packs like `pack`, with one kernel for each alignment of slices, of which there are few."""
        aligned: dict[tuple[int, int, int], list[tuple[PageId, PageId]]] = defaultdict(list)
        for row, slices in zip(rows, pages, strict=True):
            for page, source_token, target_token, count in slices:
                aligned[source_token, target_token, count].append((page, row))
            if _end(slices) < self._page_size:
                for field in self._target:
                    field[row, :, :, :, _end(slices) :] = 0
        device = self._target[0].device
        for (source_token, target_token, count), moves in aligned.items():
            index_2M = torch.tensor(moves, dtype=torch.int64).T.contiguous().to(device)
            taken = [field[:, :, :, :, source_token : source_token + count][index_2M[0]] for field in self._source]
            for field, values in zip(self._target, self._convert(taken), strict=True):
                field[:, :, :, :, target_token : target_token + count][index_2M[1]] = values

    def _convert(self, fields: list[torch.Tensor]) -> list[torch.Tensor]:
        """Converts fields of the source into those of the target."""
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
    """Returns a pool's fields as words: values [P, L, 2, K, S, H] and, if it is quantized, scales [P, L, 2, K, S]."""
    fields = [values, scales_of(values)] if is_quantized(values) else [values]
    return [field.view(_WORDS[field.element_size()]) for field in fields]


def _end(slices: PageSlices) -> int:
    return slices[-1].target_token + slices[-1].num_tokens


def _make_rows(plan: ReshardPlan, num_rows: int, device: torch.device) -> torch.Tensor:
    return torch.empty(plan.target.shape(num_rows), dtype=getattr(torch, plan.target.storage_dtype), device=device)


class Staging:
    """Lends staging rows to pushes to receivers of one layout."""

    def __init__(self, plan: ReshardPlan, pool: torch.Tensor, on_room: Callable[[], None]) -> None:
        """`on_room` is called when rows are released after some push found too few."""
        num_rows = max(2, STAGING_BYTES // plan.target.page_bytes)
        rows = _make_rows(plan, num_rows, pool.device)
        self.pages = PageBuffer(rows)
        self._repacker = Repacker(plan, pool, rows)
        self._stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # separate from the engine's stream
        if self._stream is not None:  # earlier work may still write to this reused memory
            self._stream.wait_stream(torch.cuda.current_stream(pool.device))
        self._free = [PageId(row) for row in range(num_rows)]
        self._on_room = on_room
        self._starved = False

    @property
    def num_free(self) -> int:
        return len(self._free)

    def stage(self, pages: Sequence[PageSlices], num_held: int) -> list[PageId] | None:
        """Returns rows that hold these pages, whose slices must be complete in memory, or None if too few are free. A
        receiver that already holds `num_held` rows gets at most about half of all rows, so that a stuck one leaves room
        for others.
        """
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
        """Frees rows that are no longer read."""
        self._free += rows
        if self._starved:
            self._starved = False
            self._on_room()


def sent_checksums(plan: ReshardPlan, pool: torch.Tensor, tokens: range, src_pages: Sequence[PageId]) -> list[int]:
    """Returns the checksums that the receiver's pages of `tokens` will have, computed from this pool. `tokens` starts
    at one of their boundaries; `src_pages` are the sequence's pages, from its first token on. Blocks.
    """
    if plan.whole_pages:
        size = plan.target.page_size
        return page_checksums(pool, src_pages[tokens.start // size : -(-tokens.stop // size)])
    row = _make_rows(plan, 1, pool.device)
    repacker, checksums = Repacker(plan, pool, row), []
    for slices in page_slices(plan, tokens, src_pages):
        repacker.pack([slices], [PageId(0)])
        checksums += page_checksums(row, [PageId(0)])
    return checksums
