"""Computes attention of decodes and chunks with FlashInfer (Ye et al. 2025, arXiv:2501.01005), which reads pages in
place (its layout HND with a stride between pages). Written for flashinfer-python 0.7.

A step is planned on the host, once for all layers that share scale, window and softcap, from lengths that the host
knows (`Lengths`). Owns the library's wrappers and the workspace that they share; serves one step at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flashinfer
import numpy as np
import torch

from engine.kernels.metadata import AttentionMetadata
from engine.kernels.upload import upload

WORKSPACE_BYTES = 128 << 20  # for partial results; the size that the library recommends
_GROUP_FOR_TENSOR_CORES = 4  # query heads per KV head from which they make decodes faster, by its documentation
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
    step: AttentionMetadata | None = None  # the step that the wrapper is planned for
    is_sent: torch.cuda.Event | None = None  # set when the plan's copy to the device has ended


class FlashInferAttention:
    """See `engine.kernels.libraries.attention.AttentionLibrary`."""

    takes_decodes = True

    def __init__(self, device: torch.device) -> None:
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planned: dict[_PlanKey, _PlannedWrapper] = {}
        self._lists: tuple[AttentionMetadata, dict[bool, PageLists]] | None = None

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
            planned = self._planned[key] = _PlannedWrapper(self._make(key, q_TNH, pool_layer))
        if planned.step is not meta:
            if planned.is_sent is not None:
                planned.is_sent.synchronize()  # planning overwrites pinned memory that the last plan is copied from
            self._plan(planned.wrapper, key, q_TNH, pool_layer, meta)
            planned.step = meta
            if q_TNH.is_cuda:
                planned.is_sent = torch.cuda.Event(blocking=True)
                planned.is_sent.record()
        return planned.wrapper

    def _make(self, key: _PlanKey, q_TNH: torch.Tensor, pool_layer: torch.Tensor) -> Any:
        if not key.decodes:
            return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT)
        wide = q_TNH.shape[1] // pool_layer.shape[2] >= _GROUP_FOR_TENSOR_CORES
        return flashinfer.BatchDecodeWithPagedKVCacheWrapper(self._workspace, _LAYOUT, use_tensor_cores=wide)

    def _plan(
        self, wrapper: Any, key: _PlanKey, q_TNH: torch.Tensor, pool_layer: torch.Tensor, meta: AttentionMetadata
    ) -> None:
        lists = self._lists_of(meta, key.decodes, pool_layer.shape[3])
        num_heads, num_kv_heads, (page_size, head_dim) = q_TNH.shape[1], pool_layer.shape[2], pool_layer.shape[3:]
        sizes = (num_heads, num_kv_heads, head_dim, page_size)
        options: dict[str, Any] = {
            "window_left": -1 if key.window is None else key.window - 1,  # tokens before the query
            "logits_soft_cap": key.softcap,
            "q_data_type": q_TNH.dtype,
            "kv_data_type": pool_layer.dtype,
            "sm_scale": key.scale,
        }
        if key.decodes:
            wrapper.plan(lists.start_B1, lists.pages, lists.last_B, *sizes, **options)
            return
        assert meta.lengths is not None
        start_B1 = meta.lengths.query_start_B1[meta.num_decodes :] - meta.num_decodes
        queries = _on_host(start_B1, pinned=q_TNH.is_cuda)
        wrapper.plan(queries, lists.start_B1, lists.pages, lists.last_B, *sizes, causal=True, **options)

    def _lists_of(self, meta: AttentionMetadata, decodes: bool, page_size: int) -> PageLists:
        if self._lists is None or self._lists[0] is not meta:
            self._lists = (meta, {})
        made = self._lists[1]
        if decodes not in made:
            first, stop = (0, meta.num_decodes) if decodes else (meta.num_decodes, meta.num_sequences)
            made[decodes] = page_lists(meta, first, stop, page_size)
        return made[decodes]


def page_lists(meta: AttentionMetadata, first: int, stop: int, page_size: int) -> PageLists:
    """Lists the pages of a step's sequences `first` to `stop`. Does not wait for the device, so it needs
    `meta.lengths`."""
    assert meta.lengths is not None, "steps that are planned on the host are not captured in CUDA graphs"
    context_B = meta.lengths.context_B[first:stop]
    num_pages_B = -(-context_B // page_size)
    start_B1 = np.concatenate(([0], np.cumsum(num_pages_B)))
    width = meta.page_table_BP.shape[1]
    place = np.arange(start_B1[-1]) + np.repeat(np.arange(first, stop) * width - start_B1[:-1], num_pages_B)
    device = meta.page_table_BP.device
    pages = meta.page_table_BP.reshape(-1).index_select(0, upload(place, device))
    last_B = context_B - (num_pages_B - 1) * page_size
    pinned = device.type == "cuda"
    return PageLists(_on_host(start_B1, pinned), pages, _on_host(last_B, pinned))


def _on_host(values: np.ndarray, pinned: bool) -> torch.Tensor:
    tensor = torch.from_numpy(values.astype(np.int32))
    return tensor.pin_memory() if pinned else tensor
