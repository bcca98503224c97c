"""Stores a step's new K and V into their pages (Triton).

One program a token copies both, all heads. The plain-torch twin is `write_kv` in `engine.kernels.reference`.

Shapes: `T` tokens, `K` KV heads, `H` head dim, `P` pages, `S` page size.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described where they stand)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.checks import check_index, check_like_pool, check_pool_layer


def write_kv(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    pool_layer: torch.Tensor,
    slot_page_T: torch.Tensor,
    slot_offset_T: torch.Tensor,
) -> None:
    """Write token t's K and V at `slot_offset_T[t]` of page `slot_page_T[t]`; slots (int64) are distinct."""
    check_pool_layer("write_kv", pool_layer)
    num_tokens, (num_kv_heads, head_dim) = k_TKH.shape[0], (pool_layer.shape[2], pool_layer.shape[4])
    for name, tensor in (("k_TKH", k_TKH), ("v_TKH", v_TKH)):
        if tensor.shape != (num_tokens, num_kv_heads, head_dim):
            raise ValueError(
                f"write_kv: {name} has shape {tuple(tensor.shape)}; expected {(num_tokens, num_kv_heads, head_dim)}"
            )
        check_like_pool("write_kv", name, tensor, pool_layer)
    check_index("write_kv", "slot_page_T", slot_page_T, torch.int64, (num_tokens,))
    check_index("write_kv", "slot_offset_T", slot_offset_T, torch.int64, (num_tokens,))
    if num_tokens == 0:
        return
    _write_kernel[(num_tokens,)](
        k_TKH, v_TKH, pool_layer, slot_page_T, slot_offset_T,
        k_TKH.stride(0), k_TKH.stride(1), v_TKH.stride(0), v_TKH.stride(1), *pool_layer.stride()[:4],
        NUM_KV_HEADS=num_kv_heads, HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim, HEAD_DIM_PADDED=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip


@triton.jit
def _write_kernel(
    k_ptr,  # [T, K, H], last stride 1
    v_ptr,  # [T, K, H], last stride 1
    pool_ptr,  # [P, 2, K, S, H], last stride 1
    slot_page_ptr,  # int64 [T]
    slot_offset_ptr,  # int64 [T]
    k_stride_t,
    k_stride_k,
    v_stride_t,
    v_stride_k,
    pool_stride_p,
    pool_stride_kind,
    pool_stride_k,
    pool_stride_s,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
):  # grid: (T,)
    token = tl.program_id(0).to(tl.int64)
    page = tl.load(slot_page_ptr + token)
    offset = tl.load(slot_offset_ptr + token)
    head_K = tl.arange(0, HEADS_PADDED)[:, None]
    dim_H = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask_KH = (head_K < NUM_KV_HEADS) & (dim_H < HEAD_DIM)
    slot_KH = pool_ptr + page * pool_stride_p + offset * pool_stride_s + head_K * pool_stride_k + dim_H
    k_KH = tl.load(k_ptr + token * k_stride_t + head_K * k_stride_k + dim_H, mask=mask_KH)
    tl.store(slot_KH, k_KH, mask=mask_KH)
    v_KH = tl.load(v_ptr + token * v_stride_t + head_K * v_stride_k + dim_H, mask=mask_KH)
    tl.store(slot_KH + pool_stride_kind, v_KH, mask=mask_KH)
