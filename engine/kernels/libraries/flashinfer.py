"""Computes attention of decodes and chunks with FlashInfer (Ye et al. 2025, arXiv:2501.01005), which reads pages in
place (its layout HND with a stride between pages). Written for flashinfer-python 0.7.

A step is planned on the host, once for all layers that share scale, window and softcap, from lengths that the host
knows (`Lengths`). Captured decodes are planned before each replay (`plan_decodes`): a wrapper for each bucket reads the
plan and the page lists from buffers that never move, and in this mode the library launches the same grid whatever the
lengths. Owns the library's wrappers and the workspaces that they share; serves one step at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import flashinfer
import numpy as np
import torch

from engine.kernels.attention_interface import AttentionMetadata
from engine.kernels.libraries.flashinfer_memory import (
    GROUP_FOR_TENSOR_CORES,
    PLAN_BYTES,
    WORKSPACE_BYTES,
    captured_workspace_bytes,
)
from engine.kernels.upload import upload

_LAYOUT = "HND"


@dataclass(frozen=True, slots=True)
class _PlanKey:
    """Identifies the calls of a step that share a plan."""

    decodes: bool
    scale: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class PageLists:
    """The pages of several sequences, concatenated, as FlashInfer takes them."""

    start_B1: torch.Tensor  # int32, on the host: where each sequence's pages begin
    pages: torch.Tensor  # int32, on the device
    last_B: torch.Tensor  # int32, on the host: tokens in each sequence's last page


@dataclass(slots=True)
class _PlannedWrapper:
    wrapper: Any
    sizes: tuple[int, ...]  # query heads, KV heads, head dim, page size
    options: dict[str, Any]
    step: AttentionMetadata | None = None  # the step that the wrapper is planned for; unused if captured
    is_sent: torch.cuda.Event | None = None  # set when the plan's copy to the device has ended

    def plan(self, lists: PageLists, queries: torch.Tensor | None = None) -> None:
        """Plans decodes, or the chunks whose queries begin at `queries`."""
        if self.is_sent is not None:
            self.is_sent.synchronize()  # planning overwrites pinned memory that the last plan is copied from
        if queries is None:
            self.wrapper.plan(lists.start_B1, lists.pages, lists.last_B, *self.sizes, **self.options)
        else:
            self.wrapper.plan(
                queries, lists.start_B1, lists.pages, lists.last_B, *self.sizes, causal=True, **self.options
            )
        if lists.pages.is_cuda:
            self.is_sent = torch.cuda.Event(blocking=True)
            self.is_sent.record()


@dataclass(slots=True)
class _Bucket:
    """The captured decodes of one batch size."""

    lists: PageLists
    planned: dict[_PlanKey, _PlannedWrapper] = field(default_factory=dict)


class _CapturedBuffers:
    """Holds what captured kernels read. Buckets share it, because only the one that is replayed next is planned."""

    def __init__(self, num_sequences: int, num_pages: int, device: torch.device) -> None:
        self.start_B1 = torch.zeros(num_sequences + 1, dtype=torch.int32, device=device)
        self.pages = torch.zeros(num_sequences * num_pages, dtype=torch.int32, device=device)
        self.last_B = torch.zeros(num_sequences, dtype=torch.int32, device=device)
        self.workspace: torch.Tensor | None = None
        self.plans: dict[_PlanKey, torch.Tensor] = {}


class FlashInferAttention:
    """See `engine.kernels.libraries.attention.AttentionLibrary` and `DecodePlanner`."""

    takes_decodes = True

    def __init__(self, device: torch.device) -> None:
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planned: dict[_PlanKey, _PlannedWrapper] = {}
        self._lists: tuple[AttentionMetadata, dict[bool, PageLists]] | None = None
        self._buffers: _CapturedBuffers | None = None
        self._buckets: dict[int, _Bucket] = {}  # by batch size

    @property
    def planner(self) -> FlashInferAttention:
        return self

    def plan_decodes(self, table_BW: torch.Tensor, context_B: np.ndarray, page_size: int) -> None:
        """See `engine.kernels.libraries.attention.DecodePlanner`."""
        size = len(context_B)
        if self._buffers is None:
            self._buffers = _CapturedBuffers(size, table_BW.shape[1], table_BW.device)
        lists = page_lists(table_BW, context_B, page_size)
        bucket = self._buckets.setdefault(size, _Bucket(lists))
        bucket.lists = lists
        for planned in bucket.planned.values():
            planned.plan(lists)

    def attend(
        self,
        q_TNH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        o_TNH: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        num_decodes = meta.num_decodes
        if meta.lengths is None:
            key = _PlanKey(True, scale, window, softcap)
            self._captured_wrapper(key, q_TNH, pool_layer, meta).run(q_TNH, pool_layer, out=o_TNH)
            return
        for decodes, rows, is_present in (
            (True, slice(0, num_decodes), num_decodes > 0),
            (False, slice(num_decodes, None), num_decodes < meta.num_sequences),
        ):
            if is_present:
                wrapper = self._planned_wrapper(
                    _PlanKey(decodes, scale, window, softcap), q_TNH[rows], pool_layer, meta
                )
                wrapper.run(q_TNH[rows], pool_layer, out=o_TNH[rows])

    def _planned_wrapper(
        self, key: _PlanKey, q_TNH: torch.Tensor, pool_layer: torch.Tensor, meta: AttentionMetadata
    ) -> Any:
        """Returns a wrapper that is planned for this step."""
        planned = self._planned.get(key)
        if planned is None:
            planned = self._planned[key] = _wrap(self._make(key, q_TNH, pool_layer), key, q_TNH, pool_layer)
        if planned.step is not meta:
            planned.plan(self._lists_of(meta, key.decodes, pool_layer.shape[3]), _queries_of(meta, key.decodes))
            planned.step = meta
        return planned.wrapper

    def _captured_wrapper(
        self, key: _PlanKey, q_TNH: torch.Tensor, pool_layer: torch.Tensor, meta: AttentionMetadata
    ) -> Any:
        """Returns a bucket's wrapper, which `plan_decodes` has planned. The step that is computed before the bucket is
        captured makes it and plans it."""
        bucket = self._buckets[meta.num_sequences]
        planned = bucket.planned.get(key)
        if planned is None:
            wrapper = self._make_captured(key, q_TNH, pool_layer)
            planned = bucket.planned[key] = _wrap(wrapper, key, q_TNH, pool_layer)
            planned.plan(bucket.lists)
        return planned.wrapper

    def _make(self, key: _PlanKey, q_TNH: torch.Tensor, pool_layer: torch.Tensor) -> Any:
        if not key.decodes:
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT)
        wide = _uses_tensor_cores(q_TNH, pool_layer)
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, _LAYOUT, use_tensor_cores=wide)

    def _make_captured(self, key: _PlanKey, q_TNH: torch.Tensor, pool_layer: torch.Tensor) -> Any:
        buffers, (size, num_heads, head_dim) = self._buffers, q_TNH.shape
        assert buffers is not None
        if buffers.workspace is None:
            needed = captured_workspace_bytes(num_heads, pool_layer.shape[2], head_dim, len(buffers.last_B))
            buffers.workspace = (
                self._workspace
                if needed <= WORKSPACE_BYTES
                else torch.zeros(needed, dtype=torch.uint8, device=q_TNH.device)
            )
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            buffers.workspace,
            _LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=_uses_tensor_cores(q_TNH, pool_layer),
            paged_kv_indptr_buffer=buffers.start_B1[: size + 1],
            paged_kv_indices_buffer=buffers.pages,
            paged_kv_last_page_len_buffer=buffers.last_B[:size],
        )
        if key not in buffers.plans:
            buffers.plans[key] = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=q_TNH.device)
        wrapper.reset_workspace_buffer(buffers.workspace, buffers.plans[key])
        return wrapper

    def _lists_of(self, meta: AttentionMetadata, decodes: bool, page_size: int) -> PageLists:
        if self._lists is None or self._lists[0] is not meta:
            self._lists = (meta, {})
        made = self._lists[1]
        if decodes not in made:
            assert meta.lengths is not None
            rows = slice(0, meta.num_decodes) if decodes else slice(meta.num_decodes, meta.num_sequences)
            made[decodes] = page_lists(meta.page_table_BP[rows], meta.lengths.context_B[rows], page_size)
        return made[decodes]


def page_lists(table_BW: torch.Tensor, context_B: np.ndarray, page_size: int) -> PageLists:
    """Lists the pages of sequences with these tables and lengths. Does not wait for the device."""
    num_pages_B = -(-context_B // page_size)
    start_B1 = np.concatenate(([0], np.cumsum(num_pages_B)))
    width, device = table_BW.shape[1], table_BW.device
    place = np.arange(start_B1[-1]) + np.repeat(np.arange(len(context_B)) * width - start_B1[:-1], num_pages_B)
    pages = table_BW.reshape(-1).index_select(0, upload(place, device))
    last_B = context_B - (num_pages_B - 1) * page_size
    pinned = device.type == "cuda"
    return PageLists(_on_host(start_B1, pinned), pages, _on_host(last_B, pinned))


def _wrap(wrapper: Any, key: _PlanKey, q_TNH: torch.Tensor, pool_layer: torch.Tensor) -> _PlannedWrapper:
    num_heads, num_kv_heads, (page_size, head_dim) = q_TNH.shape[1], pool_layer.shape[2], pool_layer.shape[3:]
    options: dict[str, Any] = {
        "window_left": -1 if key.window is None else key.window - 1,  # tokens before the query
        "logits_soft_cap": key.softcap,
        "q_data_type": q_TNH.dtype,
        "kv_data_type": pool_layer.dtype,
        "sm_scale": key.scale,
    }
    return _PlannedWrapper(wrapper, (num_heads, num_kv_heads, head_dim, page_size), options)


def _queries_of(meta: AttentionMetadata, decodes: bool) -> torch.Tensor | None:
    """Returns where the queries of each chunk begin, or None for decodes."""
    if decodes:
        return None
    assert meta.lengths is not None
    start_B1 = meta.lengths.query_start_B1[meta.num_decodes :] - meta.num_decodes
    return _on_host(start_B1, pinned=meta.page_table_BP.is_cuda)


def _uses_tensor_cores(q_TNH: torch.Tensor, pool_layer: torch.Tensor) -> bool:
    return q_TNH.shape[1] // pool_layer.shape[2] >= GROUP_FOR_TENSOR_CORES


def _on_host(values: np.ndarray, pinned: bool) -> torch.Tensor:
    tensor = torch.from_numpy(values.astype(np.int32))
    return tensor.pin_memory() if pinned else tensor
