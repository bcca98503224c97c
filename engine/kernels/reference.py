"""Computes paged attention in plain torch: the reference for every other kernel, and what a CPU without C++ kernels
runs.

A whole batch is computed at once: pages are gathered, and one scaled dot-product call serves all decodes, another one
all chunks. KV heads are in the call's batch dimension and the query heads that share one are in its row dimension, so K
and V are copied once and never repeated per query head.

Shapes: `T` tokens, `B` sequences, `Q` queries of the longest, `C` gathered context, `N` query heads, `K` KV heads,
`G` = N / K, `H` head dim, `P` pages, `S` page size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kernels.attention_interface import AttentionMetadata, KvLayer, QkNorms
from engine.kernels.kv_quantization import quantize
from engine.kernels.layer_ops import LayerOps


@dataclass(frozen=True, slots=True)
class _Part:
    """Adjacent sequences of the batch whose queries are padded to one length."""

    pages_X: torch.Tensor  # int64 [B * pages of the longest]
    key_rows_X: torch.Tensor  # int64 [K * B * pages of the longest], the rows of `_as_rows` that hold the keys
    num_sequences: int
    query_len: int
    token_rows: torch.Tensor | None  # int64 [B * Q], the batch's row of each padded query; None: in order
    padded_rows: torch.Tensor | None  # int64 [T], the place of each token among the padded queries
    visible_BQC: torch.Tensor  # bool


class TorchAttention:
    """Implements `engine.kernels.attention_interface.AttentionBackend`.

    Keeps the last batch's plan, because every layer of a step passes the same metadata.
    """

    name = "torch"

    def __init__(self) -> None:
        self._meta: AttentionMetadata | None = None
        self._plans: dict[int | None, list[_Part]] = {}

    def write_kv(
        self,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        scales: torch.Tensor | None = None,
    ) -> None:
        if scales is not None:
            codes = pool_layer.view(torch.uint8)  # not every device can index 8-bit floats
            for kind, rows_TKH in enumerate((k_TKH, v_TKH)):
                codes_TKH, scales_TK = quantize(rows_TKH, pool_layer.dtype)
                codes[meta.slot_page_T, kind, :, meta.slot_offset_T] = codes_TKH.view(torch.uint8)
                scales[meta.slot_page_T, kind, :, meta.slot_offset_T] = scales_TK
            return
        pool_layer[meta.slot_page_T, 0, :, meta.slot_offset_T] = k_TKH
        pool_layer[meta.slot_page_T, 1, :, meta.slot_offset_T] = v_TKH

    def store_qkv(
        self,
        qkv_TXH: torch.Tensor,
        cos_sin_T2H: torch.Tensor,
        norms: QkNorms | None,
        kv: KvLayer,
        meta: AttentionMetadata,
        ops: LayerOps,
    ) -> torch.Tensor:
        num_kv_heads = kv.pages.shape[2]
        qk_TXH, v_TKH = qkv_TXH[:, :-num_kv_heads], qkv_TXH[:, -num_kv_heads:]
        if norms is None:
            rotated_TXH = ops.rope(qk_TXH, cos_sin_T2H)
            q_TNH, k_TKH = rotated_TXH[:, :-num_kv_heads], rotated_TXH[:, -num_kv_heads:]
        else:
            q_TNH = ops.rope(ops.rms_norm(qk_TXH[:, :-num_kv_heads], norms.q_H, norms.eps), cos_sin_T2H)
            k_TKH = ops.rope(ops.rms_norm(qk_TXH[:, -num_kv_heads:], norms.k_H, norms.eps), cos_sin_T2H)
        self.write_kv(k_TKH, v_TKH, kv.pages, meta, kv.scales)
        return q_TNH

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
        plan = self._plan_of(meta, pool_layer, window)
        return _attend(q_TNH, pool_layer, plan, scale, softcap=softcap, scales=scales, sinks_N=sinks_N)

    def latent_attention(
        self,
        q_TNH: torch.Tensor,
        pool_layer: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        rank: int,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _attend(q_TNH, pool_layer, self._plan_of(meta, pool_layer, None), scale, rank=rank, scales=scales)

    def _plan_of(self, meta: AttentionMetadata, pool_layer: torch.Tensor, window: int | None) -> list[_Part]:
        if meta is not self._meta:
            self._meta, self._plans = meta, {}
        if window not in self._plans:
            self._plans[window] = _plan(meta, pool_layer, window)
        return self._plans[window]


def _plan(meta: AttentionMetadata, pool_layer: torch.Tensor, window: int | None) -> list[_Part]:
    parts = []
    if meta.num_decodes:
        parts.append(_plan_part(meta, slice(0, meta.num_decodes), 1, pool_layer, window))
    if meta.num_decodes < meta.num_sequences:
        parts.append(
            _plan_part(meta, slice(meta.num_decodes, meta.num_sequences), meta.max_query_len, pool_layer, window)
        )
    return parts


def _plan_part(
    meta: AttentionMetadata, which: slice, query_len: int, pool_layer: torch.Tensor, window: int | None
) -> _Part:
    context_B1 = meta.context_lens_B[which, None].long()
    device = context_B1.device
    page_size = pool_layer.shape[3]
    num_pages = -(-int(context_B1.max()) // page_size)
    start_B1, stop_B1 = (bounds[which, None].long() for bounds in (meta.query_start_B1[:-1], meta.query_start_B1[1:]))
    first_position_B1 = context_B1 - (stop_B1 - start_B1)
    query_Q = torch.arange(query_len, device=device)
    position_BQ1 = (first_position_B1 + query_Q)[:, :, None]
    key_C = torch.arange(num_pages * page_size, device=device)
    visible_BQC = key_C <= position_BQ1
    if window is not None:
        visible_BQC &= key_C > position_BQ1 - window
    token_rows = padded_rows = None
    if query_len > 1:
        row_BQ = start_B1 + query_Q
        is_real_BQ = row_BQ < stop_B1
        token_rows = torch.where(is_real_BQ, row_BQ, start_B1).flatten()
        padded_rows = is_real_BQ.flatten().nonzero().squeeze(1)
    num_kv_heads = pool_layer.shape[2]
    pages_X = meta.page_table_BP[which, :num_pages].long().flatten()
    rows_per_page = pool_layer.stride(0) // pool_layer.stride(2)
    key_rows_KX = pages_X * rows_per_page + torch.arange(num_kv_heads, device=device)[:, None]
    return _Part(pages_X, key_rows_KX.flatten(), context_B1.shape[0], query_len, token_rows, padded_rows, visible_BQC)


def _attend(
    q_TNH: torch.Tensor,
    pool_layer: torch.Tensor,
    parts: list[_Part],
    scale: float,
    *,
    softcap: float | None = None,
    rank: int | None = None,
    scales: torch.Tensor | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    outputs, start = [], 0
    for part in parts:
        stop = start + part.num_sequences if part.token_rows is None else q_TNH.shape[0]
        gathered = _gather(pool_layer, part) if scales is None else _dequantize(pool_layer, part, scales, q_TNH.dtype)
        outputs.append(_attend_part(q_TNH, slice(start, stop), gathered, part, scale, softcap, rank, sinks_N))
        start = stop
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_part(
    q_TNH: torch.Tensor,
    rows: slice,
    gathered: tuple[torch.Tensor, torch.Tensor],
    part: _Part,
    scale: float,
    softcap: float | None,
    rank: int | None,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    keys, values = gathered  # [K, B, C, H]
    num_kv_heads = keys.shape[0]
    batch, query_len, groups = part.num_sequences, part.query_len, q_TNH.shape[1] // num_kv_heads
    head_dim = q_TNH.shape[2]
    q_XNH = q_TNH[rows] if part.token_rows is None else q_TNH[part.token_rows]
    q_BQKGH = q_XNH.reshape(batch, query_len, num_kv_heads, groups, head_dim)
    q_KBXH = q_BQKGH.permute(2, 0, 3, 1, 4).reshape(num_kv_heads, batch, groups * query_len, head_dim)
    if rank is not None:  # a latent is one vector in two halves
        keys = torch.cat((keys, values), dim=-1)
        values = keys[..., :rank]
    visible_BGQC = part.visible_BQC[:, None].expand(-1, groups, -1, -1)
    visible_BXC = visible_BGQC.reshape(1, batch, groups * query_len, -1)
    if softcap is None and sinks_N is None:
        o_KBXH = F.scaled_dot_product_attention(q_KBXH, keys, values, attn_mask=visible_BXC, scale=scale)
    else:
        scores = q_KBXH.float() @ keys.float().transpose(2, 3) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible_BXC, float("-inf"))
        if sinks_N is None:
            weights = scores.softmax(-1)
        else:
            sinks_K1GQ = sinks_N.float().view(num_kv_heads, 1, groups, 1).expand(-1, batch, -1, query_len)
            weights = torch.cat((scores, sinks_K1GQ.flatten(2)[..., None]), dim=-1).softmax(-1)[..., :-1]
        o_KBXH = (weights @ values.float()).to(q_KBXH.dtype)
    o_BQKGH = o_KBXH.view(num_kv_heads, batch, groups, query_len, -1).permute(1, 3, 0, 2, 4)
    o_XNH = o_BQKGH.reshape(batch * query_len, num_kv_heads * groups, -1)
    return o_XNH if part.padded_rows is None else o_XNH[part.padded_rows]


def _gather(pool_layer: torch.Tensor, part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathers keys and values of the part's pages, [K, B, C, H] each."""
    num_kv_heads, _, head_dim = pool_layer.shape[2:]
    rows = _as_rows(pool_layer)
    keys, values = (
        rows.index_select(0, part.key_rows_X + kind * num_kv_heads).view(num_kv_heads, part.num_sequences, -1, head_dim)
        for kind in (0, 1)
    )
    return keys, values


def _dequantize(
    pool_layer: torch.Tensor, part: _Part, scales: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathers as `_gather` does from a quantized pool."""
    num_kv_heads, _, head_dim = pool_layer.shape[2:]
    stored = pool_layer.view(torch.uint8)  # not every device can index 8-bit floats
    keys, values = (
        (stored[part.pages_X, kind].view(pool_layer.dtype).float() * scales[part.pages_X, kind, ..., None])
        .to(dtype)
        .unflatten(0, (part.num_sequences, -1))
        .permute(2, 0, 1, 3, 4)
        .reshape(num_kv_heads, part.num_sequences, -1, head_dim)
        for kind in (0, 1)
    )
    return keys, values


def _as_rows(pool_layer: torch.Tensor) -> torch.Tensor:
    """Views the pool as contiguous rows, one for each page, layer, kind and KV head, beginning with this layer's first.

    Gathering from the strided view itself would copy the whole pool first (index_select) or go element by element.
    """
    num_pages, _, num_kv_heads, page_size, head_dim = pool_layer.shape
    row = page_size * head_dim
    assert pool_layer.stride()[1:] == (num_kv_heads * row, row, head_dim, 1), "a layer of a contiguous pool is needed"
    num_rows = (num_pages - 1) * (pool_layer.stride(0) // row) + 2 * num_kv_heads
    return pool_layer.as_strided((num_rows, row), (row, 1))
