"""Turns one step's work into tensors: what the model, the attention kernels and the sampler read.

In two halves. `lay_out` reads sequences and rows, on the step loop, and makes plain arrays of them; whoever has those
needs nothing else to compute the step, on another thread or in another process. `to_device` makes tensors of them.
Neither changes a sequence. Sequences with one token to compute stand first in the batch, because attention treats them
apart; `drawing` leads back to the caller's order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.metadata import AttentionMetadata, Lengths
from engine.roster import DecodeRows
from engine.sequence import ScheduledSequence
from engine.step_plan import StepPlan
from engine.upload import upload
from penstock.types import PageId


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One step in plain arrays. Shapes: `T` tokens, `B` sequences, `R` of them that draw, `W` pages of a sequence."""

    token_ids_T: np.ndarray  # int64
    positions_T: np.ndarray  # int64
    query_start_B1: np.ndarray  # int64
    context_B: np.ndarray  # int64, tokens of KV after this step
    page_table_BW: np.ndarray  # int32
    slot_page_T: np.ndarray  # int64
    slot_offset_T: np.ndarray  # int64
    max_query_len: int
    num_decodes: int  # sequences with one token, which stand first
    drawing: np.ndarray  # int64 [R], places in the caller's list
    draw_rows_R: np.ndarray  # int64, the batch's row of the last token of each

    @property
    def max_context_len(self) -> int:
        return int(self.context_B.max())


@dataclass(frozen=True, slots=True)
class Batch:
    """Shapes: `T` tokens in the batch, `R` sequences that draw a token."""

    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    draw_rows_R: torch.Tensor  # int64, the batch's row of the last token of each sequence that draws
    drawing: tuple[int, ...]  # place in the caller's list of each row of logits
    meta: AttentionMetadata


def build_batch(work: Sequence[ScheduledSequence], page_size: int, device: torch.device) -> Batch:
    """`work` is not empty, and each sequence has pages for the tokens it is to compute."""
    return to_device(lay_out(work, page_size), device)


def to_device(host: HostBatch, device: torch.device) -> Batch:
    """Does not wait for the device."""

    on_device = functools.partial(upload, device=device)
    meta = AttentionMetadata(
        page_table_BP=on_device(host.page_table_BW),
        query_start_B1=on_device(host.query_start_B1.astype(np.int32)),
        context_lens_B=on_device(host.context_B.astype(np.int32)),
        max_query_len=host.max_query_len,
        max_context_len=host.max_context_len,
        num_decodes=host.num_decodes,
        slot_page_T=on_device(host.slot_page_T),
        slot_offset_T=on_device(host.slot_offset_T),
        lengths=Lengths(host.context_B, host.query_start_B1),
    )
    return Batch(
        token_ids_T=on_device(host.token_ids_T),
        positions_T=on_device(host.positions_T),
        draw_rows_R=on_device(host.draw_rows_R),
        drawing=tuple(host.drawing.tolist()),
        meta=meta,
    )


def lay_out(work: Sequence[ScheduledSequence], page_size: int) -> HostBatch:
    """`work` is not empty, and each sequence has pages for the tokens it is to compute. The rows of a plan cost a few
    vector operations, everything else is looked at one by one."""
    if not isinstance(work, StepPlan) or not work.rows:
        return _lay_out_items(work, page_size)
    rows = _lay_out_rows(work.rows)
    return _join(rows, _lay_out_items(work.chunks, page_size)) if work.chunks else rows


def _lay_out_rows(rows: DecodeRows) -> HostBatch:
    places = rows.roster.places_R
    return HostBatch(
        token_ids_T=rows.token_ids_R.copy(),  # those that are awaited are written into it
        positions_T=rows.positions_R,
        query_start_B1=np.arange(len(rows) + 1),
        context_B=rows.positions_R + 1,
        page_table_BW=rows.pages_RW,
        slot_page_T=rows.pages_RW[places, rows.page_R].astype(np.int64),
        slot_offset_T=rows.offset_R,
        max_query_len=1,
        num_decodes=len(rows),
        drawing=places,
        draw_rows_R=places,
    )


def _lay_out_items(items: Sequence[ScheduledSequence], page_size: int) -> HostBatch:
    order = sorted(range(len(items)), key=lambda index: items[index].num_tokens > 1)
    counts = [items[index].num_tokens for index in order]
    token_ids: list[int] = []
    positions: list[np.ndarray] = []
    tables: list[list[PageId]] = []  # pages of each
    drawing: list[tuple[int, int]] = []  # place in `items` and the row of its last token
    for index in order:
        item = items[index]
        start, end = item.start, item.start + item.num_tokens
        token_ids += item.sequence.token_ids[start:end]
        positions.append(np.arange(start, end))
        tables.append(item.sequence.pages[: -(-end // page_size)])
        assert len(tables[-1]) * page_size >= end, f"{item.sequence.request_id} has no page for its next tokens"
        if item.draws:
            drawing.append((index, len(token_ids) - 1))
    page_table_BW = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, pages in zip(page_table_BW, tables, strict=True):
        row[: len(pages)] = pages
    positions_T, ends = np.concatenate(positions), np.cumsum([0, *counts])
    page_T, offset_T = np.divmod(positions_T, page_size)
    places, draw_rows_R = np.array(drawing, np.int64).reshape(-1, 2).T.copy()
    return HostBatch(
        token_ids_T=np.array(token_ids, np.int64),
        positions_T=positions_T,
        query_start_B1=ends,
        context_B=positions_T[ends[1:] - 1] + 1,
        page_table_BW=page_table_BW,
        slot_page_T=page_table_BW[np.repeat(np.arange(len(counts)), counts), page_T].astype(np.int64),
        slot_offset_T=offset_T,
        max_query_len=max(counts),
        num_decodes=counts.count(1),
        drawing=places,
        draw_rows_R=draw_rows_R,
    )


def _join(rows: HostBatch, items: HostBatch) -> HostBatch:
    """`rows`: a token each; `items` stand behind them, in the batch as in the caller's list."""
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
        drawing=np.concatenate((rows.drawing, items.drawing + num_rows)),
        draw_rows_R=np.concatenate((rows.draw_rows_R, items.draw_rows_R + num_rows)),
    )
