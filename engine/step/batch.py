"""Turns one step's work into the tensors that the model, the attention kernels and the sampler read.

`build_host_batch` reads sequences and rows, on the step loop, and returns plain arrays; with those, another thread or
process can compute the step. `to_device` makes tensors of them. Neither changes a sequence. Sequences with one token to
compute come first in the batch, because attention treats them separately; `sampled_places` maps rows back to the
caller's order.

A sequence with proposed tokens takes a batch row for its last token and one for each of these, with the same pages and
a context that grows by one. A layer writes the KV of the whole batch before it attends, so each row sees the tokens
before it, and it is computed by the kernels of plain decode steps: its logits are those that a separate step would
give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine.cache.windows.sink_window import SinkWindow
from engine.graphs.page_tables import UNKNOWN, PageTables
from engine.kernels.attention_interface import AttentionMetadata, Lengths
from engine.kernels.upload import upload_all
from engine.step.plan import DecodeRows, StepPlan
from engine.step.prompt_scores import ScoredTokens
from engine.step.sequence import ScheduledSequence
from penstock.errors import InternalError
from penstock.types import PageId


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A step in plain arrays. Shapes: `T` tokens, `B` sequences, `R` sampled sequences, `W` pages of a sequence."""

    token_ids_T: np.ndarray  # int64
    positions_T: np.ndarray  # int64
    query_start_B1: np.ndarray  # int64
    context_B: np.ndarray  # int64, tokens of KV after this step
    page_table_BW: np.ndarray  # int32
    slot_page_T: np.ndarray  # int64
    slot_offset_T: np.ndarray  # int64
    max_query_len: int
    num_decodes: int  # sequences with one token, which come first
    # int64 [R], place in the caller's list of each sampled sequence; repeated for each proposed token
    sampled_places: np.ndarray
    logit_rows_R: np.ndarray  # int64, batch row of its last token; then those of scored tokens
    scored: ScoredTokens | None = None
    adapter_T: np.ndarray | None = None  # int64, slot of each row's adapter, 0 for none; None: no row has one
    taps: bool = True  # False: hidden states are not handed out, even if layers are tapped
    all_rows: bool = False  # the last layer computes all tokens, not only the sampled ones
    # int64, for each leading row the number of its page table's latest edit (`DecodeRows.edits_R`).
    edits_R: np.ndarray | None = None
    # Where the windowed layers' parts of these pages are, if they are kept apart; 0 where a sequence has none.
    window_table_BW: np.ndarray | None = None  # int32
    window_slot_T: np.ndarray | None = None  # int64

    @property
    def max_context_len(self) -> int:
        return int(self.context_B.max())


@dataclass(frozen=True, slots=True)
class Batch:
    """A step on the device. Shapes: `T` tokens in the batch, `R` sampled sequences."""

    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    logit_rows_R: torch.Tensor  # int64, batch row of the last token of each sampled sequence; then scored rows
    sampled_places: tuple[int, ...]  # place in the caller's list of each row of logits
    meta: AttentionMetadata
    adapter_T: torch.Tensor | None = None  # int64, as in `HostBatch`
    taps: bool = True  # as in `HostBatch`
    all_rows: bool = False  # as in `HostBatch`
    uses_tables: bool = False  # `meta.page_table_BP` is a part of `PageTables`


class UploadedStep(NamedTuple):
    batch: Batch
    more: list[torch.Tensor]  # arrays that went along


class ForwardOutput(NamedTuple):
    """The results of a forward. Shapes: `R` sampled rows, `V` vocabulary, `T` tokens, `X` hidden states of a token."""

    logits_RV: torch.Tensor
    states_TX: torch.Tensor | None = None  # hidden states, if any layer is tapped (`ModelRunner.tap`)


class Forward(Protocol):
    """Computes a batch, up to the logits of its sampled rows."""

    def __call__(self, batch: Batch, *, on_start: Callable[[], None] | None = None) -> ForwardOutput:
        """Calls `on_start` once the batch is laid out, right before it is computed."""
        ...


def build_batch(
    work: Sequence[ScheduledSequence], page_size: int, device: torch.device, slot_of_P: np.ndarray | None = None
) -> Batch:
    """See `build_host_batch`."""
    return to_device(build_host_batch(work, page_size, slot_of_P), device)


def to_device(host: HostBatch, device: torch.device) -> Batch:
    """Copies a batch to the device, by one copy and without waiting for it."""
    return upload_step(host, device).batch


def upload_step(
    host: HostBatch, device: torch.device, tables: PageTables | None = None, more: Sequence[np.ndarray] = ()
) -> UploadedStep:
    """Copies a batch and `more` arrays to the device, by one copy and without waiting for it.

    With `tables`, only those entries of page tables are sent that have changed. They hold one step at a time: the next
    one must be launched behind this one, on the same stream.
    """
    changes = None
    if tables is not None and tables.takes(host.page_table_BW):
        changes = tables.changes(host.page_table_BW, _edits_of(host))
    columns = (
        host.token_ids_T,
        host.positions_T,
        host.logit_rows_R,
        host.query_start_B1.astype(np.int32),
        host.context_B.astype(np.int32),
        host.slot_page_T,
        host.slot_offset_T,
        *(() if host.adapter_T is None else (host.adapter_T,)),
    )
    table = (host.page_table_BW,) if changes is None else (changes.places_C, changes.pages_C)
    apart = () if host.window_table_BW is None else (host.window_table_BW, host.window_slot_T)
    uploaded = upload_all((*table, *columns, *apart, *more), device)
    on_table, on_columns = uploaded[: len(table)], uploaded[len(table) : len(table) + len(columns)]
    others = uploaded[len(table) + len(columns) :]
    token_ids_T, positions_T, logit_rows_R, query_start_B1, context_B, page_T, offset_T, *adapter = on_columns
    table_BW = on_table[0] if tables is None or changes is None else tables.write(changes, *on_table)
    meta = AttentionMetadata(
        page_table_BP=table_BW,
        query_start_B1=query_start_B1,
        context_lens_B=context_B,
        max_query_len=host.max_query_len,
        max_context_len=host.max_context_len,
        num_decodes=host.num_decodes,
        slot_page_T=page_T,
        slot_offset_T=offset_T,
        lengths=Lengths(host.context_B, host.query_start_B1),
    )
    if apart:
        window_table_BW, window_slot_T = others[:2]
        windowed = replace(meta, page_table_BP=window_table_BW, slot_page_T=window_slot_T, plans={})
        meta = replace(meta, windowed=windowed)
    places = tuple(host.sampled_places.tolist())
    adapter_T = adapter[0] if adapter else None
    batch = Batch(
        token_ids_T, positions_T, logit_rows_R, places, meta, adapter_T, host.taps, host.all_rows, changes is not None
    )
    return UploadedStep(batch, others[len(apart) :])


def _edits_of(host: HostBatch) -> np.ndarray:
    """Returns the number of each batch row's latest edit."""
    edits_B = np.full(len(host.context_B), UNKNOWN, np.int64)
    if host.edits_R is not None:
        edits_B[: len(host.edits_R)] = host.edits_R
    return edits_B


def build_host_batch(
    work: Sequence[ScheduledSequence],
    page_size: int,
    slot_of_P: np.ndarray | None = None,
    sinks: SinkWindow | None = None,
) -> HostBatch:
    """Returns the arrays of a step; `work` is not empty, and every sequence has pages for the tokens to compute.
    `slot_of_P` says where the windowed layers' part of each page is (`WindowParts`); None: pages are whole. `sinks`
    limits attention; None: tokens see all before them.

    The rows of a plan cost a few vector operations, all other sequences a Python loop.
    """
    return add_windowed_parts(skip_gaps(_host_batch(work, page_size), sinks), slot_of_P)


def skip_gaps(host: HostBatch, sinks: SinkWindow | None) -> HostBatch:
    """Removes the pages that a row's tokens do not see from its page table, and shortens its context accordingly.

    Tokens of a chunk that see different pages become rows of their own; their order in the batch stays. Positions, and
    the places that new KV is written to, do not change. Shapes: `X` rows of the result.
    """
    if sinks is None or not (gap_T := _gaps(host.positions_T, sinks)).any():
        return host
    row_T = np.repeat(np.arange(len(host.context_B)), np.diff(host.query_start_B1))
    is_first_T = np.ones(len(row_T), bool)
    is_first_T[1:] = (np.diff(row_T) != 0) | (np.diff(gap_T) != 0)
    query_start_X1 = np.append(is_first_T.nonzero()[0], len(row_T))
    first_X, last_X = query_start_X1[:-1], query_start_X1[1:] - 1
    context_X = host.positions_T[last_X] + 1 - gap_T[first_X] * sinks.page_size
    pages_X1 = -(-context_X[:, None] // sinks.page_size)
    column_W = np.arange(int(pages_X1.max()))
    column_XW = column_W + np.where(column_W < sinks.num_sink_pages, 0, gap_T[first_X, None])
    is_used_XW = column_W < pages_X1
    page_table_XW = host.page_table_BW[row_T[first_X, None], np.where(is_used_XW, column_XW, 0)]
    return replace(
        host,
        query_start_B1=query_start_X1,
        context_B=context_X,
        page_table_BW=np.where(is_used_XW, page_table_XW, 0).astype(np.int32),
        max_query_len=int(np.diff(query_start_X1).max()),
        edits_R=None,  # a row's entries move without an edit
    )


def add_windowed_parts(host: HostBatch, slot_of_P: np.ndarray | None) -> HostBatch:
    """Adds where the windowed layers' parts of a batch's pages are; see `build_host_batch`."""
    if slot_of_P is None:
        return host
    window_slot_T = slot_of_P[host.slot_page_T].astype(np.int64)
    if window_slot_T.min() < 0:
        raise InternalError("a page of the tokens to compute has no room for windowed layers")
    window_table_BW = np.maximum(slot_of_P[host.page_table_BW], 0)  # parts behind the window are masked
    return replace(host, window_table_BW=window_table_BW, window_slot_T=window_slot_T)


def _gaps(positions_T: np.ndarray, sinks: SinkWindow) -> np.ndarray:
    """Returns the length in pages of the gap (`SinkWindow.gap`) that the token at each position does not see."""
    num_behind_T = np.maximum(positions_T - sinks.num_recent + 1, 0) // sinks.page_size
    gap_T: np.ndarray = np.maximum(num_behind_T - sinks.num_sink_pages, 0)
    return gap_T


def _host_batch(work: Sequence[ScheduledSequence], page_size: int) -> HostBatch:
    if not isinstance(work, StepPlan) or not work.rows:
        return _items_batch(work, page_size)
    rows = _rows_batch(work.rows, work.taps)
    return _concatenate(rows, _items_batch(work.chunks, page_size)) if work.chunks else rows


def _rows_batch(rows: DecodeRows, taps: bool) -> HostBatch:
    places = rows.members.places_R
    return HostBatch(
        token_ids_T=rows.token_ids_R.copy(),  # awaited tokens are written into it
        positions_T=rows.positions_R,
        query_start_B1=np.arange(len(rows) + 1),
        context_B=rows.positions_R + 1,
        page_table_BW=rows.pages_RW,
        slot_page_T=rows.pages_RW[places, rows.page_R].astype(np.int64),
        slot_offset_T=rows.offset_R,
        max_query_len=1,
        num_decodes=len(rows),
        sampled_places=places,
        logit_rows_R=places,
        adapter_T=rows.members.adapters,
        taps=taps,
        edits_R=rows.edits_R,
    )


class _ItemColumns:
    """Collects sequences one by one, in batch order, as columns from which arrays are made."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.counts: list[int] = []  # tokens of each batch row
        self.token_ids: list[int] = []
        self.positions: list[np.ndarray] = []
        self.tables: list[list[PageId]] = []
        self.num_rows: list[int] = []  # of the batch, for each item: one, and one for each proposed token
        self.sampled: list[tuple[int, int]] = []  # place in the caller's list, batch row of the last token
        self.scored: list[tuple[int, int]] = []  # place in the caller's list, batch row of the first token

    def add(self, place: int, item: ScheduledSequence) -> None:
        """Adds the sequence at this place of the caller's list. Raises InternalError if it lacks a page."""
        num_proposed = len(item.proposed)
        start, stop = item.start, item.start + item.num_positions
        if len(item.sequence.pages) * self._page_size < stop:
            raise InternalError(
                f"{item.sequence.request_id} has no page for its next tokens: {len(item.sequence.pages)} for {stop}"
            )
        self.counts += [item.num_tokens, *[1] * num_proposed]
        self.token_ids += item.sequence.token_ids[start : start + item.num_tokens]
        self.token_ids += item.proposed
        self.positions.append(np.arange(start, stop))
        self.tables.append(item.sequence.pages[: -(-stop // self._page_size)])
        self.num_rows.append(1 + num_proposed)
        end = len(self.token_ids)
        if item.is_sampled:
            self.sampled += [(place, row) for row in range(end - 1 - num_proposed, end)]
        if item.sequence.scores_prompt and start + 1 < item.sequence.num_prompt_tokens:
            self.scored.append((place, end - item.num_positions))

    def page_table(self) -> np.ndarray:
        """Returns the pages of each batch row, [B, W]."""
        page_table_IW = np.zeros((len(self.tables), max(map(len, self.tables))), np.int32)
        for row, pages in zip(page_table_IW, self.tables, strict=True):
            row[: len(pages)] = pages
        return np.repeat(page_table_IW, self.num_rows, axis=0)


def first_rows(work: Sequence[ScheduledSequence]) -> list[int]:
    """Returns the batch row of each item's first token."""
    num_rows = len(work.rows) if isinstance(work, StepPlan) else 0
    items = work.chunks if isinstance(work, StepPlan) else work
    rows, next_row = [*range(num_rows), *[0] * len(items)], num_rows
    for index in _batch_order(items):
        rows[num_rows + index] = next_row
        next_row += items[index].num_positions
    return rows


def _batch_order(items: Sequence[ScheduledSequence]) -> list[int]:
    """Returns the items' indexes in the order of the batch."""
    return sorted(range(len(items)), key=lambda index: items[index].num_tokens > 1)


def _items_batch(items: Sequence[ScheduledSequence], page_size: int) -> HostBatch:
    order = _batch_order(items)
    columns = _ItemColumns(page_size)
    for place in order:
        columns.add(place, items[place])
    counts, page_table_BW = columns.counts, columns.page_table()
    positions_T, ends = np.concatenate(columns.positions), np.cumsum([0, *counts])
    page_T, offset_T = np.divmod(positions_T, page_size)
    places, logit_rows_R = np.array(columns.sampled, np.int64).reshape(-1, 2).T.copy()
    scored_tokens = None
    if columns.scored:
        scored_tokens, scored_rows_S = _scored_tokens(items, columns.scored)
        logit_rows_R = np.concatenate((logit_rows_R, scored_rows_S))
    return HostBatch(
        token_ids_T=np.array(columns.token_ids, np.int64),
        positions_T=positions_T,
        query_start_B1=ends,
        context_B=positions_T[ends[1:] - 1] + 1,
        page_table_BW=page_table_BW,
        slot_page_T=page_table_BW[np.repeat(np.arange(len(counts)), counts), page_T].astype(np.int64),
        slot_offset_T=offset_T,
        max_query_len=max(counts),
        num_decodes=counts.count(1),
        sampled_places=places,
        logit_rows_R=logit_rows_R,
        scored=scored_tokens,
        adapter_T=_slots_of(items, order),
    )


def _slots_of(items: Sequence[ScheduledSequence], order: Sequence[int]) -> np.ndarray | None:
    slots = [items[index].sequence.adapter_slot for index in order]
    return np.repeat(np.array(slots, np.int64), [items[index].num_positions for index in order]) if any(slots) else None


def _scored_tokens(
    items: Sequence[ScheduledSequence], scored: Sequence[tuple[int, int]]
) -> tuple[ScoredTokens, np.ndarray]:
    """Returns the prompt tokens that follow the computed ones, and the batch row before each."""
    token_ids: list[int] = []
    columns: list[tuple[np.ndarray, ...]] = []  # positions, places, alternatives, batch rows
    for index, first_row in scored:
        sequence, start = items[index].sequence, items[index].start
        end = min(start + items[index].num_tokens, sequence.num_prompt_tokens - 1)
        count = end - start
        token_ids += sequence.token_ids[start + 1 : end + 1]
        num_top = sequence.sampling.prompt_logprobs or 0
        positions = np.arange(start + 1, end + 1)
        columns.append((positions, np.full(count, index), np.full(count, num_top), first_row + np.arange(count)))
    positions_S, places_S, num_top_S, rows_S = (np.concatenate(column) for column in zip(*columns, strict=True))
    return ScoredTokens(np.array(token_ids, np.int64), positions_S, places_S, num_top_S), rows_S


def _concatenate(rows: HostBatch, items: HostBatch) -> HostBatch:
    """Appends `items` to `rows`, which have one token each, in the batch as in the caller's list."""
    num_rows, width = rows.page_table_BW.shape
    num_items, item_width = items.page_table_BW.shape
    page_table_BW = np.zeros((num_rows + num_items, max(width, item_width)), np.int32)
    page_table_BW[:num_rows, :width] = rows.page_table_BW
    page_table_BW[num_rows:, :item_width] = items.page_table_BW
    return HostBatch(
        token_ids_T=np.concatenate((rows.token_ids_T, items.token_ids_T)),
        positions_T=np.concatenate((rows.positions_T, items.positions_T)),
        query_start_B1=np.concatenate((rows.query_start_B1[:-1], items.query_start_B1 + num_rows)),
        context_B=np.concatenate((rows.context_B, items.context_B)),
        page_table_BW=page_table_BW,
        slot_page_T=np.concatenate((rows.slot_page_T, items.slot_page_T)),
        slot_offset_T=np.concatenate((rows.slot_offset_T, items.slot_offset_T)),
        max_query_len=items.max_query_len,
        num_decodes=num_rows + items.num_decodes,
        sampled_places=np.concatenate((rows.sampled_places, items.sampled_places + num_rows)),
        logit_rows_R=np.concatenate((rows.logit_rows_R, items.logit_rows_R + num_rows)),
        scored=items.scored and replace(items.scored, places_S=items.scored.places_S + num_rows),
        adapter_T=_join_slots(rows, items),
        edits_R=rows.edits_R,
    )


def _join_slots(*parts: HostBatch) -> np.ndarray | None:
    if all(part.adapter_T is None for part in parts):
        return None
    slots = [np.zeros_like(part.token_ids_T) if part.adapter_T is None else part.adapter_T for part in parts]
    return np.concatenate(slots)
