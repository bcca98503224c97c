"""The attention interface over the paged pool: the backend that layers call, and what a step's calls are given.

`engine.kernels.backends` chooses a backend. `engine.step.batch` builds the metadata once per step; every layer's
kernels read it and change nothing but `plans`.

Shapes: `T` tokens in the batch, `N` query heads, `K` KV heads, `H` head dim, `B` sequences, `P` pages of the pool, `S`
page size.
`q_TNH`, `k_TKH`, `v_TKH`: queries, keys and values of the batch's tokens.
`pool_layer`: `kv_pages[:, layer]`, a strided view [P, 2, K, S, H] with K at index 0 and V at index 1.
`scales`: for a quantized pool (float8_e4m3fn, int8), a float32 view [P, 2, K, S] into the same pages; any strides, but
the last is 1. A token's stored values times its scale are its K or V. None: the pool holds the queries' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from engine.kernels.layer_ops import LayerOps

# Bounds on splitting a context among the programs of a GPU.
MIN_SPLIT_TOKENS = 256  # below this, joining costs more than another program gains
MAX_SPLITS = 64
SPLIT_TOKENS = 512  # of a work item of decode attention: 128 KiB of K and of V at head dim 128 in bf16


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Views of one layer's part of every page. Only the attention backend writes through them."""

    pages: torch.Tensor  # [P, 2, K, S, H]; K at index 0, V at 1
    scales: torch.Tensor | None = None  # float32 [P, 2, K, S] of quantized pages; see the module


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
    # By window: plans that a backend has derived from these lengths on the device, reused by the following layers.
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


class AttentionBackend(Protocol):
    name: str

    def write_kv(
        self,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Stores the batch's K and V at `meta`'s slots."""
        ...

    def store_qkv(
        self,
        qkv_TXH: torch.Tensor,
        cos_sin_T2H: torch.Tensor,
        norms: QkNorms | None,
        kv: KvLayer,
        meta: AttentionMetadata,
        ops: LayerOps,
    ) -> torch.Tensor:
        """Normalises (where there are norms) and rotates queries and keys, stores K and V at `meta`'s slots, and
        returns the rotated queries [T, N, H].

        `qkv_TXH` is a layer's projection: the heads of queries, keys and values in this order. `cos_sin_T2H` is as in
        `LayerOps.rope`."""
        ...

    def paged_attention(
        self,
        q_TNH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        scales: torch.Tensor | None = None,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns causal attention of each query over its sequence's pages, [T, N, H].

        `window` counts the query itself; with `softcap` a score s becomes softcap * tanh(s / softcap). `sinks_N`
        has a score for each query head that takes its share of the weights but has no value. Never waits for
        the device, and reads only bounds of `meta` on the host, so a CUDA graph can capture the call."""
        ...

    def latent_attention(
        self,
        q_TNH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        rank: int,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns causal attention over latents, [T, N, rank]. A token's halves at index 0 and 1 form one vector of H
        values: the whole vector is its key, the first `rank` values are its value."""
        ...
