"""Turns a fused projection into rotated queries and into K and V in their pages, in one pass (Triton).

Heads of queries and keys are normalised in families that do so, then rotated (Su et al. 2021, arXiv:2104.09864); keys
and values go straight to their slots. Without a pool the kernel only rotates. Computes in fp32. Reference: `store_qkv`
of `engine.kernels.reference.TorchAttention`.

Shapes: `T` tokens, `X` heads of a projection: `N` of queries, then `K` of keys, then `K` of values; `H` head dim,
`P` pages, `S` page size, `B` heads of a program.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_interface import QkNorms
from engine.kernels.checks import check_index, check_like_pool, check_pool_layer
from engine.kernels.triton.common import cdiv, next_power_of_2

_VALUES = 2048  # of a program


def rope_qkv(
    qkv_TXH: torch.Tensor,
    cos_sin_T2H: torch.Tensor,
    norms: QkNorms | None,
    pool_layer: torch.Tensor,
    slot_page_T: torch.Tensor,
    slot_offset_T: torch.Tensor,
) -> torch.Tensor:
    """Returns rotated queries [T, N, H], and writes token t's K and V to `slot_offset_T[t]` of page `slot_page_T[t]`.

    `cos_sin_T2H` is float32 [T, 2, H / 2].
    """
    check_pool_layer("rope_qkv", pool_layer)
    check_like_pool("rope_qkv", "qkv_TXH", qkv_TXH, pool_layer)
    num_tokens, num_rows, head_dim = qkv_TXH.shape
    num_kv_heads = pool_layer.shape[2]
    if head_dim != pool_layer.shape[4] or num_rows <= 2 * num_kv_heads:
        raise ValueError(
            f"rope_qkv: qkv_TXH has shape {tuple(qkv_TXH.shape)}; the pool has {num_kv_heads} heads of "
            f"{pool_layer.shape[4]}"
        )
    check_index("rope_qkv", "slot_page_T", slot_page_T, torch.int64, (num_tokens,))
    check_index("rope_qkv", "slot_offset_T", slot_offset_T, torch.int64, (num_tokens,))
    num_heads = num_rows - 2 * num_kv_heads
    q_TNH = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv_TXH.dtype, device=qkv_TXH.device)
    _launch(qkv_TXH, cos_sin_T2H, norms, q_TNH, num_heads, num_kv_heads, pool_layer, slot_page_T, slot_offset_T)
    return q_TNH


def rope(
    x_TNH: torch.Tensor, cos_sin_T2H: torch.Tensor, norms: QkNorms | None = None, num_queries: int | None = None
) -> torch.Tensor:
    """Returns a new tensor with every head rotated; the first `num_queries` heads are queries, the others keys."""
    num_heads = x_TNH.shape[1]
    queries = num_heads if num_queries is None else num_queries
    out_TNH = torch.empty(x_TNH.shape, dtype=x_TNH.dtype, device=x_TNH.device)
    _launch(x_TNH, cos_sin_T2H, norms, out_TNH, queries, num_heads - queries, None, None, None)
    return out_TNH


def _launch(
    x_TXH: torch.Tensor,
    cos_sin_T2H: torch.Tensor,
    norms: QkNorms | None,
    out_TNH: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    pool_layer: torch.Tensor | None,
    slot_page_T: torch.Tensor | None,
    slot_offset_T: torch.Tensor | None,
) -> None:
    num_tokens, num_rows, head_dim = x_TXH.shape
    if cos_sin_T2H.shape != (num_tokens, 2, head_dim // 2) or not cos_sin_T2H.is_contiguous() or head_dim % 2:
        raise ValueError(
            f"rope: cos_sin_T2H has shape {tuple(cos_sin_T2H.shape)}; expected {(num_tokens, 2, head_dim // 2)}, "
            f"contiguous, and head dim {head_dim} even"
        )
    if cos_sin_T2H.dtype != torch.float32 or x_TXH.stride(2) != 1:
        raise ValueError(f"rope: cos_sin_T2H is {cos_sin_T2H.dtype}, heads have strides {x_TXH.stride()}")
    if num_tokens == 0:
        return
    q_norm_H, k_norm_H = (x_TXH, x_TXH) if norms is None else (norms.q_H, norms.k_H)
    half = head_dim // 2
    padded = next_power_of_2(half)
    heads = max(1, min(_VALUES // (2 * padded), next_power_of_2(num_rows)))
    _rope_kernel[(num_tokens, cdiv(num_rows, heads))](
        x_TXH, cos_sin_T2H, q_norm_H, k_norm_H, out_TNH, x_TXH if pool_layer is None else pool_layer,
        cos_sin_T2H if slot_page_T is None else slot_page_T, cos_sin_T2H if slot_offset_T is None else slot_offset_T,
        0.0 if norms is None else norms.eps, x_TXH.stride(0), x_TXH.stride(1), out_TNH.stride(0), out_TNH.stride(1),
        *((0, 0, 0, 0) if pool_layer is None else pool_layer.stride()[:4]),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, NUM_ROWS=num_rows, HALF=half, HALF_PADDED=padded, HEADS=heads,
        HAS_NORM=norms is not None, HAS_POOL=pool_layer is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _rope_kernel(
    x_ptr,  # [T, X, H], last stride 1
    cos_sin_ptr,  # fp32 [T, 2, H / 2] contiguous
    q_norm_ptr,  # [H]; both are read only with HAS_NORM
    k_norm_ptr,  # [H]
    out_ptr,  # [T, N, H], last stride 1; without HAS_POOL keys follow the queries
    pool_ptr,  # [P, 2, K, S, H], last stride 1; written only with HAS_POOL
    slot_page_ptr,  # int64 [T]
    slot_offset_ptr,  # int64 [T]
    eps,
    x_stride_t,
    x_stride_x,
    out_stride_t,
    out_stride_n,
    pool_stride_p,
    pool_stride_kind,
    pool_stride_k,
    pool_stride_s,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_POOL: tl.constexpr,
):  # grid: (T, groups of B heads)
    token = tl.program_id(0).to(tl.int64)
    row_B = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim_H = tl.arange(0, HALF_PADDED)
    in_half_H = dim_H < HALF
    mask_BH = (row_B < NUM_ROWS)[:, None] & in_half_H[None, :]
    place_BH = token * x_stride_t + row_B[:, None] * x_stride_x + dim_H[None, :]
    raw_first_BH = tl.load(x_ptr + place_BH, mask=mask_BH, other=0.0)
    raw_second_BH = tl.load(x_ptr + place_BH + HALF, mask=mask_BH, other=0.0)
    first_BH, second_BH = raw_first_BH.to(tl.float32), raw_second_BH.to(tl.float32)
    if HAS_NORM:
        squares_B = tl.sum(first_BH * first_BH, 1) + tl.sum(second_BH * second_BH, 1)
        inverse_B1 = tl.rsqrt(squares_B / (2 * HALF) + eps)[:, None]
        is_query_B1 = (row_B < NUM_HEADS)[:, None]
        first_BH *= inverse_B1 * tl.where(
            is_query_B1, _weights(q_norm_ptr + dim_H, in_half_H), _weights(k_norm_ptr + dim_H, in_half_H)
        )
        second_BH *= inverse_B1 * tl.where(
            is_query_B1, _weights(q_norm_ptr + HALF + dim_H, in_half_H), _weights(k_norm_ptr + HALF + dim_H, in_half_H)
        )
    angles = cos_sin_ptr + token * (2 * HALF)
    cos_H = tl.load(angles + dim_H, mask=in_half_H, other=0.0)[None, :]
    sin_H = tl.load(angles + HALF + dim_H, mask=in_half_H, other=0.0)[None, :]
    dtype = out_ptr.dtype.element_ty
    turned_first_BH = (first_BH * cos_H - second_BH * sin_H).to(dtype)
    turned_second_BH = (second_BH * cos_H + first_BH * sin_H).to(dtype)
    is_out_B1 = (row_B < (NUM_HEADS if HAS_POOL else NUM_ROWS))[:, None]
    out_BH = out_ptr + token * out_stride_t + row_B[:, None] * out_stride_n + dim_H[None, :]
    tl.store(out_BH, turned_first_BH, mask=mask_BH & is_out_B1)
    tl.store(out_BH + HALF, turned_second_BH, mask=mask_BH & is_out_B1)
    if HAS_POOL:
        kv_B = row_B - NUM_HEADS
        is_value_B = kv_B >= NUM_KV_HEADS
        head_B = kv_B % NUM_KV_HEADS
        page = pool_ptr + tl.load(slot_page_ptr + token) * pool_stride_p
        slot_B = is_value_B.to(tl.int64) * pool_stride_kind + head_B * pool_stride_k
        slot_B += tl.load(slot_offset_ptr + token) * pool_stride_s
        slot_BH = page + slot_B[:, None] + dim_H[None, :]
        kept_B1 = is_value_B[:, None]
        mask_BH = mask_BH & (kv_B >= 0)[:, None]
        tl.store(slot_BH, tl.where(kept_B1, raw_first_BH, turned_first_BH), mask=mask_BH)
        tl.store(slot_BH + HALF, tl.where(kept_B1, raw_second_BH, turned_second_BH), mask=mask_BH)


@triton.jit
def _weights(ptr_H, in_half_H):
    return tl.load(ptr_H, mask=in_half_H, other=0.0).to(tl.float32)[None, :]
