"""Turns one step's work list into tensors: what the model and the attention kernels read.

Pure: reads sequences and never changes them. Sequences with one token to compute stand first in the batch, because
attention treats them apart; `Batch.rows` leads back to the caller's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.metadata import AttentionMetadata
from engine.sequence import ScheduledSequence


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
    order = sorted(range(len(work)), key=lambda index: work[index].num_tokens > 1)
    ordered = [work[index] for index in order]
    start_B = np.array([item.sequence.num_computed_tokens for item in ordered], dtype=np.int64)
    count_B = np.array([item.num_tokens for item in ordered], dtype=np.int64)
    context_B = start_B + count_B
    query_start_B1 = np.concatenate(([0], np.cumsum(count_B)))
    page_table_BP = _build_page_table(ordered, context_B, page_size)
    sequence_T = np.repeat(np.arange(len(ordered)), count_B)
    positions_T = np.arange(query_start_B1[-1]) - (query_start_B1[:-1] - start_B)[sequence_T]
    token_ids: list[int] = []
    for item, start in zip(ordered, start_B.tolist(), strict=True):
        token_ids += item.sequence.token_ids[start : start + item.num_tokens]
    draws = [row for row, item in enumerate(ordered) if item.draws]

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    meta = AttentionMetadata(
        page_table_BP=on_device(page_table_BP),
        query_start_B1=on_device(query_start_B1.astype(np.int32)),
        context_lens_B=on_device(context_B.astype(np.int32)),
        max_query_len=int(count_B.max()),
        max_context_len=int(context_B.max()),
        num_decodes=int((count_B == 1).sum()),
        slot_page_T=on_device(page_table_BP[sequence_T, positions_T // page_size].astype(np.int64)),
        slot_offset_T=on_device(positions_T % page_size),
    )
    return Batch(
        token_ids_T=on_device(np.array(token_ids, dtype=np.int64)),
        positions_T=on_device(positions_T),
        draw_rows_R=on_device(query_start_B1[1:][draws] - 1),
        drawing=tuple(order[row] for row in draws),
        meta=meta,
    )


def _build_page_table(ordered: Sequence[ScheduledSequence], context_B: np.ndarray, page_size: int) -> np.ndarray:
    num_pages_B = (-(-context_B // page_size)).tolist()
    page_table_BP = np.zeros((len(ordered), max(num_pages_B)), dtype=np.int32)
    for row, (item, num_pages) in enumerate(zip(ordered, num_pages_B, strict=True)):
        assert len(item.sequence.pages) >= num_pages, f"{item.sequence.request_id} has no page for its next tokens"
        page_table_BP[row, :num_pages] = item.sequence.pages[:num_pages]
    return page_table_BP
