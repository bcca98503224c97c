"""Splits a batch for layers in which a token sees only its chunk of the text (Llama 4), so that the attention kernels
need no other mask: each piece of a sequence that lies in one chunk becomes a sequence, whose pages are the chunk's.

Shapes: `B` sequences, `X` pieces, `P` pages of a sequence, `W` pages of a chunk.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.kernels.attention_interface import AttentionMetadata


def split_at_chunks(
    meta: AttentionMetadata, chunk_tokens: int, page_size: int, *, drops_empty: bool
) -> AttentionMetadata:
    """Returns a batch of the same tokens whose sequences see no token before their chunk; pages must divide chunks.

    The number of pieces depends on `max_query_len` alone, so that a CUDA graph can capture this; some have no query.
    `drops_empty` removes those, for which a GPU would have to wait."""
    table_BP = meta.page_table_BP
    pieces = 1 + -(-(meta.max_query_len - 1) // chunk_tokens)  # of a sequence with several queries, at most
    num_decodes = meta.num_decodes
    piece_X = torch.arange((meta.num_sequences - num_decodes) * pieces, device=table_BP.device)
    sequence_X = torch.cat((torch.arange(num_decodes, device=table_BP.device), piece_X // pieces + num_decodes))
    piece_X = torch.cat((torch.zeros_like(sequence_X[:num_decodes]), piece_X % pieces))
    stop_B, context_B = meta.query_start_B1[1:], meta.context_lens_B
    first_position_B = (context_B - (stop_B - meta.query_start_B1[:-1])).clamp(min=0)
    chunk_start_X = (first_position_B[sequence_X] // chunk_tokens + piece_X) * chunk_tokens
    context_X = context_B[sequence_X]
    end_X = torch.minimum(chunk_start_X + chunk_tokens, context_X)
    query_stop_X = stop_B[sequence_X] - (context_X - end_X).int()
    query_start_X1 = torch.cat((meta.query_start_B1[:1], query_stop_X))
    if drops_empty and pieces > 1:
        has_queries_X = query_start_X1.diff() > 0
        sequence_X, chunk_start_X, end_X = (x[has_queries_X] for x in (sequence_X, chunk_start_X, end_X))
        query_start_X1 = torch.cat((query_start_X1[:1], query_stop_X[has_queries_X]))
    num_pages = table_BP.shape[1]
    page_W = torch.arange(min(num_pages, chunk_tokens // page_size), device=table_BP.device)
    page_XW = (chunk_start_X[:, None] // page_size + page_W).clamp(max=num_pages - 1)
    return replace(
        meta,
        page_table_BP=table_BP[sequence_X[:, None], page_XW],
        query_start_B1=query_start_X1,
        context_lens_B=(end_X - chunk_start_X).clamp(min=0).int(),
        max_query_len=min(meta.max_query_len, chunk_tokens),
        max_context_len=min(meta.max_context_len, chunk_tokens),
        lengths=None,
        plans={},
    )
