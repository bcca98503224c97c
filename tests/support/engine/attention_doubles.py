"""Provides doubles of attention libraries for a CPU. They accept only what the real libraries document, check it, and
compute by the definition in float64.

FlashInfer's as of 0.7 (`BatchDecodeWithPagedKVCacheWrapper`, `BatchPrefillWithPagedKVCacheWrapper`), torch's
`varlen_attn` as of 2.13 with FlashAttention 3, which needs the block table, and its cuDNN operation.
"""

from __future__ import annotations

import math
import sys
import types
from typing import ClassVar

import numpy as np
import pytest
import torch


def attend_pages(
    q_TNH: torch.Tensor,
    k_PSKH: torch.Tensor,
    v_PSKH: torch.Tensor,
    pages: list[int],
    context: int,
    scale: float,
    window_left: int,
    softcap: float | None,
) -> torch.Tensor:
    """Attends from the last queries of one sequence to the tokens up to each of them, at most `window_left` before it
    (-1 for all)."""
    k_CKH, v_CKH = (x[pages].flatten(0, 1)[:context].double().numpy() for x in (k_PSKH, v_PSKH))
    place_T1 = np.arange(context - len(q_TNH), context)[:, None]
    token_C = np.arange(context)
    seen_TC = (token_C <= place_T1) & (token_C >= (0 if window_left < 0 else place_T1 - window_left))
    group = q_TNH.shape[1] // k_CKH.shape[1]
    out = np.zeros(q_TNH.shape)
    for head, q_TH in enumerate(q_TNH.double().numpy().swapaxes(0, 1)):
        score_TC = q_TH @ k_CKH[:, head // group].T * scale
        if softcap:
            score_TC = softcap * np.tanh(score_TC / softcap)
        weight_TC = np.where(seen_TC, np.exp(score_TC - np.where(seen_TC, score_TC, -np.inf).max(1, keepdims=True)), 0)
        out[:, head] = weight_TC / weight_TC.sum(1, keepdims=True) @ v_CKH[:, head // group]
    return torch.from_numpy(out).to(q_TNH.dtype)


class Replays:
    """Says whether a graph is being captured or replayed, when kernels run and nothing may be planned."""

    is_running = False


class _Wrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert not float_workspace_buffer.any(), "zeros for its first use"
        assert kv_layout == "HND", "the pool's layout"
        assert not Replays.is_running, "allocates pinned memory"
        self.num_plans = 0
        self._sequences: list[tuple[int, list[int], int]] | None = None  # queries, pages, context

    def _plan(
        self,
        starts: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        options: tuple[torch.dtype, torch.dtype, float, int, float | None],
    ) -> None:
        assert not Replays.is_running, "cannot be captured"
        for listed in (starts, indptr, indices, last_page_len):
            assert listed.dtype == torch.int32
            assert listed.dim() == 1
            assert listed.is_contiguous()
        assert starts[0] == indptr[0] == 0
        assert len(starts) == len(indptr) == len(last_page_len) + 1
        assert indptr[-1] == len(indices)
        assert num_qo_heads % num_kv_heads == 0
        self._shape = (num_kv_heads, page_size, head_dim)
        self._num_heads = num_qo_heads
        self._options = options
        self._sequences = []
        for number, last in enumerate(last_page_len.tolist()):
            pages = indices[indptr[number] : indptr[number + 1]].tolist()
            assert pages
            assert 1 <= last <= page_size
            queries = int(starts[number + 1] - starts[number])
            context = (len(pages) - 1) * page_size + last
            assert 1 <= queries <= context
            self._sequences.append((queries, pages, context))
        self.num_plans += 1

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        assert self._sequences is not None, "planned first"
        q_type, kv_type, scale, window_left, softcap = self._options
        assert (q.dtype, paged_kv_cache.dtype) == (q_type, kv_type)
        assert paged_kv_cache.dim() == 5
        assert paged_kv_cache.shape[1] == 2
        assert tuple(paged_kv_cache.shape[2:]) == self._shape
        assert paged_kv_cache.stride(-1) == 1
        assert (
            q.shape == out.shape == (sum(sequence[0] for sequence in self._sequences), self._num_heads, self._shape[2])
        )
        k_PSKH, v_PSKH = (x.transpose(1, 2) for x in paged_kv_cache.unbind(dim=1))
        row = 0
        for queries, pages, context in self._sequences:
            rows = slice(row, row + queries)
            out[rows] = attend_pages(q[rows], k_PSKH, v_PSKH, pages, context, scale, window_left, softcap)
            row += queries
        return out


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """With `use_cuda_graph`, what `run` computes depends only on the buffers, as replayed kernels do."""

    captured: ClassVar[list[BatchDecodeWithPagedKVCacheWrapper]] = []  # all wrappers with `use_cuda_graph`

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores
        self.planned: list[tuple[list[int], list[int], list[int], tuple[object, ...]]] = []
        self._buffers: tuple[torch.Tensor, ...] = ()
        self._workspaces = (float_workspace_buffer, torch.zeros(16, dtype=torch.uint8))
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            assert all(buffer.dtype == torch.int32 and buffer.is_contiguous() for buffer in self._buffers)
            self.captured.append(self)

    @property
    def addresses(self) -> list[int]:
        return [buffer.data_ptr() for buffer in (*self._buffers, *self._workspaces)]

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert not Replays.is_running, "allocates pinned memory"
        for workspace in (float_workspace_buffer, int_workspace_buffer):
            assert workspace.dtype == torch.uint8
            assert workspace.data_ptr() % 16 == 0
        self._workspaces = (float_workspace_buffer, int_workspace_buffer)

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if self._buffers:
            assert self._sequences is not None, "planned first"
            indptr, indices, last_page_len = (buffer.tolist() for buffer in self._buffers)
            assert self._workspaces[1][:8].view(torch.int64).item() == id(self), "another wrapper's plan"
            self._sequences = [
                (1, indices[start:stop], (stop - start - 1) * self._shape[1] + last)
                for start, stop, last in zip(indptr[:-1], indptr[1:], last_page_len, strict=True)
            ]
        return super().run(q, paged_kv_cache, out=out)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
    ) -> None:
        options = (q_data_type, kv_data_type or q_data_type, sm_scale or head_dim**-0.5, window_left, logits_soft_cap)
        starts = torch.arange(len(indptr), dtype=torch.int32)
        self._plan(
            starts, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, options
        )  # fmt: skip
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.planned.append((indptr.tolist(), indices.tolist(), last_page_len.tolist(), (*sizes, *options)))
        if self._buffers:
            assert len(last_page_len) == len(self._buffers[2]), "the batch size is fixed"
            assert len(indices) <= len(self._buffers[1])
            for buffer, listed in zip(self._buffers, (indptr, indices, last_page_len), strict=True):
                buffer[: len(listed)].copy_(listed)
            self._workspaces[1][:8].view(torch.int64).fill_(id(self))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal
        options = (
            q_data_type,
            kv_data_type or q_data_type,
            sm_scale or head_dim_qk**-0.5,
            window_left,
            logits_soft_cap,
        )
        self._plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim_qk, page_size, options,
        )  # fmt: skip


def flashinfer_double() -> types.ModuleType:
    module = types.ModuleType("flashinfer")
    for double in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(module, double.__name__, double)
    return module


def varlen_double(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    assert seqused_k is not None
    assert block_table is not None
    assert cu_seq_k is None, "FlashAttention 3 takes a table or these"
    assert seqused_k.dtype == block_table.dtype == cu_seq_q.dtype == torch.int32
    assert seqused_k.shape[0] == block_table.shape[0] == cu_seq_q.shape[0] - 1
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert query.shape[0] == cu_seq_q[-1]
    assert cu_seq_q[0] == 0
    assert window_size[1] == 0, "causal"
    assert all(x.stride(-1) == 1 for x in (query, key, value, seqused_k, block_table))
    assert int(seqused_k.max()) <= max_k
    assert int(cu_seq_q.diff().max()) <= max_q
    rows = []
    for number, context in enumerate(seqused_k.tolist()):
        pages = block_table[number, : math.ceil(context / key.shape[1])].tolist()
        queries = query[cu_seq_q[number] : cu_seq_q[number + 1]]
        rows.append(
            attend_pages(queries, key, value, pages, context, scale or query.shape[2] ** -0.5, window_size[0], None)
        )
    return torch.cat(rows)


class CudnnDouble:
    """Stands in for `torch.ops.aten._scaled_dot_product_cudnn_attention`, whose K and V may have fewer heads and whose
    causal mask begins at the first token. Records the shapes that it has met, since cuDNN makes a plan for each.
    """

    def __init__(self) -> None:
        self.shapes: set[tuple[int, int, bool]] = set()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_bias: torch.Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[torch.Tensor | int | None, ...]:
        assert attn_bias is None, "a shape of its own for each chunk"
        assert compute_log_sumexp
        assert dropout_p == 0
        assert not return_debug_mask
        (batch, heads, num_queries, dim), (_, kv_heads, context, _) = query.shape, key.shape
        assert value.shape == key.shape == (batch, kv_heads, context, dim)
        assert query.dtype == key.dtype == value.dtype
        assert heads % kv_heads == 0
        assert dim % 8 == 0
        assert not is_causal or num_queries == context, "cuDNN's mask begins at the upper left"
        for x in (query, key, value):
            assert x.stride(-1) == 1
            assert x.isfinite().all(), "masked values count as 0 times their value"
        self.shapes.add((num_queries, context, is_causal))
        group = heads // kv_heads
        keys, values = (x.double().repeat_interleave(group, 1) for x in (key, value))
        scores = query.double() @ keys.mT * (dim**-0.5 if scale is None else scale)
        if is_causal:
            scores = scores.masked_fill(torch.ones(num_queries, context).triu(1).bool(), -math.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        out = ((scores - lse).exp() @ values).to(query.dtype)
        seed = torch.zeros((), dtype=torch.int64)
        return out, lse.float(), None, None, num_queries, context, seed, seed, None


def install(patch: pytest.MonkeyPatch) -> None:
    """Makes all libraries importable."""
    patch.setitem(sys.modules, "flashinfer", flashinfer_double())
    patch.setattr("engine.kernels.libraries.varlen.varlen_attn", varlen_double)
    patch.setattr("engine.kernels.libraries.cudnn._attend", CudnnDouble())
