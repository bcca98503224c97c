"""Lays out tokens as rows of a decode step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.step.batch import HostBatch
from penstock.types import PageId


class NewTokens(NamedTuple):
    """Successive tokens of one text whose KV is missing."""

    token_ids: list[int]
    positions: Sequence[int]
    first_slot: int  # the place of the first one among the text's KV
    pages: list[PageId]


def lay_out(texts: Sequence[NewTokens], page_size: int) -> HostBatch:
    """Returns a step with a row for each token; the last row of each text is sampled."""
    counts = [len(text.token_ids) for text in texts]
    tables_BW = np.zeros((len(counts), max(len(text.pages) for text in texts)), np.int32)
    for row, text in zip(tables_BW, texts, strict=True):
        row[: len(text.pages)] = text.pages
    if sum(counts) > len(counts):
        tables_BW = np.repeat(tables_BW, counts, axis=0)
    slots_T = np.concatenate([np.arange(text.first_slot, text.first_slot + len(text.token_ids)) for text in texts])
    page_T, offset_T = np.divmod(slots_T, page_size)
    rows = np.arange(len(slots_T))
    return HostBatch(
        token_ids_T=np.array([token_id for text in texts for token_id in text.token_ids]),
        positions_T=np.array([position for text in texts for position in text.positions]),
        query_start_B1=np.arange(len(slots_T) + 1),
        context_B=slots_T + 1,
        page_table_BW=tables_BW,
        slot_page_T=tables_BW[rows, page_T].astype(np.int64),
        slot_offset_T=offset_T,
        max_query_len=1,
        num_decodes=len(slots_T),
        sampled_places=np.arange(len(counts)),
        logit_rows_R=np.cumsum(counts) - 1,
    )


def num_missing_pages(num_tokens: int, pages: list[PageId], page_size: int) -> int:
    """Returns how many more pages the KV of so many tokens takes; 0 or less if none."""
    return -(-num_tokens // page_size) - len(pages)
