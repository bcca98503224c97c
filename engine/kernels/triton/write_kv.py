"""Stores a step's new K and V in their pages (Triton).

One program per token copies all heads of both; into a quantized pool it writes codes with a scale for each head.
Reference: `write_kv` of `engine.kernels.reference.TorchAttention`.

Shapes: `T` tokens, `K` KV heads, `H` head dim, `P` pages, `S` page size.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.checks import MAX_LATENT_HALF, check_index, check_like_pool, check_pool_layer, check_scales
from engine.kernels.kv_quantization import LARGEST, SMALLEST_PEAK
from engine.kernels.triton.common import next_power_of_2


def write_kv(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    pool_layer: torch.Tensor,
    slot_page_T: torch.Tensor,
    slot_offset_T: torch.Tensor,
) -> None:
    """Writes token t's K and V at `slot_offset_T[t]` of page `slot_page_T[t]`; slots (int64) are distinct."""
    num_tokens, num_kv_heads, head_dim = _check(k_TKH, v_TKH, pool_layer, slot_page_T, slot_offset_T)
    for name, tensor in (("k_TKH", k_TKH), ("v_TKH", v_TKH)):
        check_like_pool("write_kv", name, tensor, pool_layer)
    if num_tokens == 0:
        return
    _write_kernel[(num_tokens,)](
        k_TKH, v_TKH, pool_layer, slot_page_T, slot_offset_T,
        k_TKH.stride(0), k_TKH.stride(1), v_TKH.stride(0), v_TKH.stride(1), *pool_layer.stride()[:4],
        NUM_KV_HEADS=num_kv_heads, HEADS_PADDED=next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim, HEAD_DIM_PADDED=next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip


def write_kv_quantized(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    pool_layer: torch.Tensor,
    slot_page_T: torch.Tensor,
    slot_offset_T: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """Writes as `write_kv` does into a quantized pool: codes of `pool_layer`'s dtype, and their float32 scales to
    `scales` [P, 2, K, S]."""
    if pool_layer.dtype not in LARGEST:
        raise ValueError(f"write_kv: pool_layer is {pool_layer.dtype}; expected codes")
    num_tokens, num_kv_heads, head_dim = _check(k_TKH, v_TKH, pool_layer, slot_page_T, slot_offset_T)
    check_scales("write_kv", scales, pool_layer)
    if num_tokens == 0:
        return
    whole = pool_layer.dtype == torch.int8
    codes = pool_layer if whole else pool_layer.view(torch.uint8)
    _write_quantized_kernel[(num_tokens, 2)](
        k_TKH, v_TKH, codes, scales, slot_page_T, slot_offset_T,
        k_TKH.stride(0), k_TKH.stride(1), v_TKH.stride(0), v_TKH.stride(1), *pool_layer.stride()[:4],
        *scales.stride()[:3], NUM_KV_HEADS=num_kv_heads, HEADS_PADDED=next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim, HEAD_DIM_PADDED=next_power_of_2(head_dim), LARGEST=LARGEST[pool_layer.dtype],
        SMALLEST_PEAK=SMALLEST_PEAK, WHOLE=whole, num_warps=4,
    )  # fmt: skip


def _check(
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    pool_layer: torch.Tensor,
    slot_page_T: torch.Tensor,
    slot_offset_T: torch.Tensor,
) -> tuple[int, int, int]:
    """Checks what both kernels need; returns the number of tokens, KV heads and head dim."""
    check_pool_layer("write_kv", pool_layer, MAX_LATENT_HALF)  # halves of latents are written like K and V
    shape = (k_TKH.shape[0], pool_layer.shape[2], pool_layer.shape[4])
    for name, tensor in (("k_TKH", k_TKH), ("v_TKH", v_TKH)):
        if tensor.shape != shape or tensor.stride(2) != 1:
            raise ValueError(
                f"write_kv: {name} has shape {tuple(tensor.shape)}, strides {tensor.stride()}; expected {shape}, "
                "the last dense"
            )
    check_index("write_kv", "slot_page_T", slot_page_T, torch.int64, shape[:1])
    check_index("write_kv", "slot_offset_T", slot_offset_T, torch.int64, shape[:1])
    return shape


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


@triton.jit
def to_e4m3(value):
    """Rounds to nearest, ties to even, for |value| <= 448. Works on bits, because not every device rounds like this,
    nor does the interpreter."""
    bits = value.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # (127 - 7) << 3: the other bias
    tiny = (tl.abs(value) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # in steps of 2^-9, the smallest e4m3
    code = tl.where(tl.abs(value) < 0.015625, tiny, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write_quantized_kernel(
    k_ptr,  # [T, K, H], last stride 1
    v_ptr,  # [T, K, H], last stride 1
    pool_ptr,  # int8, or e4m3 as uint8, [P, 2, K, S, H], last stride 1
    scales_ptr,  # fp32 [P, 2, K, S], last stride 1
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
    scales_stride_p,
    scales_stride_kind,
    scales_stride_k,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_PEAK: tl.constexpr,
    WHOLE: tl.constexpr,  # codes are integers
):  # grid: (T, 2)
    token = tl.program_id(0).to(tl.int64)
    kind = tl.program_id(1)
    page = tl.load(slot_page_ptr + token)
    offset = tl.load(slot_offset_ptr + token)
    head_K = tl.arange(0, HEADS_PADDED)
    dim_H = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask_KH = (head_K[:, None] < NUM_KV_HEADS) & (dim_H < HEAD_DIM)
    if kind == 0:
        rows_KH = tl.load(k_ptr + token * k_stride_t + head_K[:, None] * k_stride_k + dim_H, mask=mask_KH, other=0.0)
    else:
        rows_KH = tl.load(v_ptr + token * v_stride_t + head_K[:, None] * v_stride_k + dim_H, mask=mask_KH, other=0.0)
    rows_KH = rows_KH.to(tl.float32)
    peak_K = tl.max(tl.abs(rows_KH), 1)
    peak_K = tl.where(peak_K < SMALLEST_PEAK, 0.0, peak_K)
    largest_K = tl.full([HEADS_PADDED], LARGEST, tl.float32)
    factor_K = tl.where(peak_K > 0, tl.div_rn(largest_K, tl.where(peak_K > 0, peak_K, 1.0)), 0.0)
    scaled_KH = tl.minimum(tl.maximum(rows_KH * factor_K[:, None], -LARGEST), LARGEST)
    if WHOLE:
        scaled_KH = (scaled_KH + 12582912.0) - 12582912.0  # 1.5 * 2^23 leaves no bits for a fraction; ties to even
        code_KH = scaled_KH.to(tl.int8)
    else:
        code_KH = to_e4m3(scaled_KH)
    slot_KH = pool_ptr + page * pool_stride_p + kind * pool_stride_kind + offset * pool_stride_s
    tl.store(slot_KH + head_K[:, None] * pool_stride_k + dim_H, code_KH, mask=mask_KH)
    scale_K = scales_ptr + page * scales_stride_p + kind * scales_stride_kind + head_K * scales_stride_k + offset
    tl.store(scale_K, tl.div_rn(peak_K, largest_K), mask=head_K < NUM_KV_HEADS)
