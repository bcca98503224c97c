"""What an attention kernel must know of a batch besides its tensors.

Built once per step by `engine.batch` and read by every layer's kernels, which never change it.

Shapes: `T` tokens in the batch, `B` sequences, `P` pages of the pool, `S` page size, `K` KV heads, `H` head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

# How a context is split between programs of a GPU.
MIN_SPLIT_TOKENS = 256  # below, joining costs more than a program more gains
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class KvLayer:
    """What one layer has of every page: views, which the attention backend alone writes through."""

    pages: torch.Tensor  # [P, 2, K, S, H]; K at index 0, V at 1
    scales: torch.Tensor | None = None  # float32 [P, 2, K, S] where pages are quantized; see `engine.kernels`


@dataclass(frozen=True, slots=True)
class QkNorms:
    """Norms of each query's and each key's head, where a family has them."""

    q_H: torch.Tensor
    k_H: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """What the host knows of a step's sequences, for libraries that plan there."""

    context_B: np.ndarray  # int64, tokens of KV after this step
    query_start_B1: np.ndarray  # int64

    def of(self, first: int, stop: int) -> Lengths:
        """Of these sequences alone."""
        start_B1 = self.query_start_B1[first : stop + 1]
        return Lengths(self.context_B[first:stop], start_B1 - start_B1[0])


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where each sequence's queries and pages stand.

    The tokens of one sequence are neighbours in the batch, and the first `num_decodes` sequences have one query
    token each. New K/V are written into the pool (`write_kv`) before attention reads it.
    """

    page_table_BP: torch.Tensor  # int32 [B, max_pages]; entries past a sequence's last page are 0
    query_start_B1: torch.Tensor  # int32 [B + 1], cumulative: queries of b stand at [start[b], start[b + 1])
    context_lens_B: torch.Tensor  # int32 [B], tokens of KV after this step, the new ones included
    max_query_len: int  # the longest, or a bound
    max_context_len: int  # likewise: a CUDA graph is captured with the largest that it may be replayed with
    num_decodes: int
    slot_page_T: torch.Tensor  # int64 [T], page that takes the token's K/V
    slot_offset_T: torch.Tensor  # int64 [T], its place in the page
    lengths: Lengths | None = None  # None inside a CUDA graph, where the device alone knows them

    @property
    def num_sequences(self) -> int:
        return self.context_lens_B.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.slot_page_T.shape[0]
