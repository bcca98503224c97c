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
        return _assemble(None, work, page_size)
    if work.chunks:
        return _assemble(work.rows, work.chunks, page_size)
    rows, places = work.rows, work.rows.roster.places_R
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


def _assemble(rows: DecodeRows | None, items: Sequence[ScheduledSequence], page_size: int) -> HostBatch:
    """Of rows, if there are any, and of items that stand behind them in the caller's list."""
    order = sorted(range(len(items)), key=lambda index: items[index].num_tokens > 1)
    ordered = [items[index] for index in order]
    start_B = np.array([item.start for item in ordered], dtype=np.int64)
    count_B = np.array([item.num_tokens for item in ordered], dtype=np.int64)
    tokens: list[int] = []
    for item, start in zip(ordered, start_B.tolist(), strict=True):
        tokens += item.sequence.token_ids[start : start + item.num_tokens]
    token_ids_T, num_rows = np.array(tokens, dtype=np.int64), 0
    if rows is not None:
        num_rows = len(rows)
        start_B = np.concatenate((rows.positions_R, start_B))
        count_B = np.concatenate((np.ones(num_rows, np.int64), count_B))
        token_ids_T = np.concatenate((rows.token_ids_R, token_ids_T))
    context_B = start_B + count_B
    query_start_B1 = np.concatenate(([0], np.cumsum(count_B)))
    page_table_BW = _page_table(rows, ordered, context_B[num_rows:], page_size)
    sequence_T = np.repeat(np.arange(len(count_B)), count_B)
    positions_T = np.arange(query_start_B1[-1]) - (query_start_B1[:-1] - start_B)[sequence_T]
    draws = np.array([True] * num_rows + [item.draws for item in ordered])
    places = np.concatenate((np.arange(num_rows), np.array(order, dtype=np.int64) + num_rows))
    return HostBatch(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        query_start_B1=query_start_B1,
        context_B=context_B,
        page_table_BW=page_table_BW,
        slot_page_T=page_table_BW[sequence_T, positions_T // page_size].astype(np.int64),
        slot_offset_T=positions_T % page_size,
        max_query_len=int(count_B.max()),
        num_decodes=int((count_B == 1).sum()),
        drawing=places[draws],
        draw_rows_R=query_start_B1[1:][draws] - 1,
    )


def _page_table(
    rows: DecodeRows | None, items: Sequence[ScheduledSequence], context_B: np.ndarray, page_size: int
) -> np.ndarray:
    num_pages_B = (-(-context_B // page_size)).tolist()
    table_RW = np.zeros((0, 0), np.int32) if rows is None else rows.pages_RW
    num_rows = len(table_RW)
    page_table_BW = np.zeros((num_rows + len(items), max(*num_pages_B, table_RW.shape[1], 1)), dtype=np.int32)
    page_table_BW[:num_rows, : table_RW.shape[1]] = table_RW
    for row, (item, num_pages) in enumerate(zip(items, num_pages_B, strict=True), start=num_rows):
        assert len(item.sequence.pages) >= num_pages, f"{item.sequence.request_id} has no page for its next tokens"
        page_table_BW[row, :num_pages] = item.sequence.pages[:num_pages]
    return page_table_BW
