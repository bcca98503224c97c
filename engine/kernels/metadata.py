"""Describes a batch to attention kernels, besides its tensors.

`engine.step.batch` builds it once per step; every layer's kernels read it and change nothing but `plans`.

Shapes: `T` tokens in the batch, `B` sequences, `P` pages of the pool, `S` page size, `K` KV heads, `H` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

# Bounds on splitting a context among the programs of a GPU.
MIN_SPLIT_TOKENS = 256  # below this, joining costs more than another program gains
MAX_SPLITS = 64
SPLIT_TOKENS = 512  # of a work item of decode attention: 128 KiB of K and of V at head dim 128 in bf16


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Views of one layer's part of every page. Only the attention backend writes through them."""

    pages: torch.Tensor  # [P, 2, K, S, H]; K at index 0, V at 1
    scales: torch.Tensor | None = None  # float32 [P, 2, K, S] of quantized pages; see `engine.kernels.backends`


@dataclass(frozen=True, slots=True)
class QkNorms:
    """The norms of query heads and key heads, in families that have them."""

    q_H: torch.Tensor
    k_H: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """The lengths of a step's sequences on the host, for libraries that plan there."""

    context_B: np.ndarray  # int64, tokens of KV after this step
    query_start_B1: np.ndarray  # int64

    def select(self, first: int, stop: int) -> Lengths:
        """Returns the lengths of sequences `first` to `stop`."""
        start_B1 = self.query_start_B1[first : stop + 1]
        return Lengths(self.context_B[first:stop], start_B1 - start_B1[0])


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Locates each sequence's queries and pages.

    The tokens of one sequence are adjacent in the batch, and the first `num_decodes` sequences have one query token
    each. New K and V are written into the pool (`write_kv`) before attention reads it.
    """

    page_table_BP: torch.Tensor  # int32 [B, max_pages]; entries past a sequence's last page are 0
    query_start_B1: torch.Tensor  # int32 [B + 1], cumulative: sequence b has queries [start[b], start[b + 1])
    context_lens_B: torch.Tensor  # int32 [B], tokens of KV after this step, including the new ones
    max_query_len: int  # the longest, or a bound
    max_context_len: int  # the longest, or a bound: a CUDA graph is captured with the largest that it may replay
    num_decodes: int
    slot_page_T: torch.Tensor  # int64 [T], the page that receives the token's K and V
    slot_offset_T: torch.Tensor  # int64 [T], the token's place in the page
    lengths: Lengths | None = None  # None inside a CUDA graph, which is captured once for all lengths
    # By window: what a backend has derived from these lengths on the device, for the layers that follow.
    plans: dict[int | None, Any] = field(default_factory=dict)
    windowed: AttentionMetadata | None = None  # for windowed layers whose part of a page is elsewhere; None: this

    @property
    def num_sequences(self) -> int:
        return self.context_lens_B.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slot_page_T.shape[0]


def select_sequences(meta: AttentionMetadata, first: int, stop: int, num_decodes: int) -> AttentionMetadata:
    """Returns the metadata of sequences `first` to `stop`: all decodes, or all chunks. Its slots stay those of the
    whole batch, because only the write, which is over, needs them."""
    return replace(
        meta,
        page_table_BP=meta.page_table_BP[first:stop],
        query_start_B1=meta.query_start_B1[first : stop + 1] - meta.query_start_B1[first],
        context_lens_B=meta.context_lens_B[first:stop],
        max_query_len=1 if num_decodes else meta.max_query_len,
        num_decodes=num_decodes,
        lengths=None if meta.lengths is None else meta.lengths.select(first, stop),
    )
